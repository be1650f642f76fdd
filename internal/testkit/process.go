package testkit

import (
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time of a process so far, by clock_getcpuclockid(3).
func CPUTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	const sched = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	Must(t, unix.ClockGettime(int32(^pid)<<3|sched, &ts))
	return time.Duration(ts.Nano())
}

// Resident returns the resident memory of a process in bytes.
func Resident(t testing.TB, pid int) float64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid)) // proc_pid_statm(5)
	Must(t, err)
	var size, pages float64
	fmt.Sscan(string(data), &size, &pages)
	return pages * float64(os.Getpagesize())
}
