package bpf

import (
	"time"

	"golang.org/x/sys/unix"
)

// Clock returns the time of bpf_ktime_get_ns.
func Clock() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // this clock always exists
	return uint64(now.Nano())
}

// Zero returns the wall time at which Clock was 0. It takes the best of several readings, because
// the caller may lose its CPU between reading the two clocks.
func Zero() (zero time.Time) {
	best := time.Hour
	for range 20 {
		began, now := time.Now(), Clock()
		if took := time.Since(began); took < best {
			best, zero = took, began.Add(took/2-time.Duration(now))
		}
	}
	return zero
}
