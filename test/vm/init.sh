#!/bin/busybox sh
# Process 1 of a guest: it mounts what a container host has mounted (cgroup v2
# only), loads the modules, and runs the tests. A guest with a disk has a separate
# system there, with systemd, which runs the tests as a service (testdata/node).
# The kernel writes to the first serial port, the tests write to the second.
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
if [ -b /dev/vda ]; then
	mkdir /system
	mount -t ext4 /dev/vda /system
	cp -a /patterns /run.sh /settings /src /tests /system/
	cp /bin/fairlead /system/usr/bin/
	exec switch_root /system /sbin/init
fi
ip link set lo up
hostname guest
# As systemd does: enable the controllers for the groups below the root.
for c in $(cat /sys/fs/cgroup/cgroup.controllers); do
	echo "+$c" >/sys/fs/cgroup/cgroup.subtree_control
done

. /run.sh
