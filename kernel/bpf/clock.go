package bpf

import "golang.org/x/sys/unix"

// Clock returns the time as of bpf_ktime_get_ns.
func Clock() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // there is always one
	return uint64(now.Nano())
}
