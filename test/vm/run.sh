#!/bin/sh
# Runs every test binary of a guest and stops the machine.
. /settings
exec </dev/null >$port 2>&1
stty -F $port raw
export HOME=/root TMPDIR=/tmp

echo "@@@ kernel $(uname -r)"
# Fuzz seeds give the same result on any kernel, and take time here. One test at
# a time: both CPUs are one thread of the emulator, and before 6.8 threads are
# identified by the names of their devices, which tests share.
for t in /tests/*; do
	name=${t##*/}
	echo "@@@ begin $name"
	cd "/src/$name" && timeout -s QUIT 2700 "$t" -test.v=test2json -test.parallel 1 -test.short -test.timeout 2600s -test.skip=^Fuzz "-test.run=$(cat "/patterns/$name")"
	echo "@@@ end $name $?"
done
echo "@@@ done"
sync
busybox poweroff -f
