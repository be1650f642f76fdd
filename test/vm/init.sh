#!/bin/busybox sh
# Process 1 of a guest: mounts what a host of containers has mounted (cgroup v2
# only), loads the modules, runs every test binary and stops the machine. The
# kernel writes to the first serial port, the tests write to the second.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root TMPDIR=/tmp

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
. /settings
exec </dev/null >$port 2>&1
stty -F $port raw

for m in /modules/*.ko; do
	insmod "$m" || echo "@@@ no module $m"
done
ip link set lo up
hostname guest
# As systemd does: controllers for the groups below the root.
for c in $(cat /sys/fs/cgroup/cgroup.controllers); do
	echo "+$c" >/sys/fs/cgroup/cgroup.subtree_control
done

echo "@@@ kernel $(uname -r)"
# Fuzz seeds are as good on any kernel, and cost time here. One test at a time: both
# CPUs are one thread of the emulator, and before 6.8 threads are told by the names
# of their devices, which tests share.
for t in /tests/*; do
	name=${t##*/}
	echo "@@@ begin $name"
	cd "/src/$name" && timeout -s QUIT 2700 "$t" -test.v=test2json -test.parallel 1 -test.short -test.timeout 2600s -test.skip=^Fuzz "-test.run=$(cat "/patterns/$name")"
	echo "@@@ end $name $?"
done
echo "@@@ done"
sync
poweroff -f
