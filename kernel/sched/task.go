package sched

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// TaskUsage returns the usage of any thread, by its id in the pid namespace of proc. Another thread
// may have taken the id since the caller learned it. Errors: journal.ErrGone; fs.ErrNotExist where
// the kernel does not count (CONFIG_SCHED_INFO).
func TaskUsage(proc string, tid int) (Usage, error) {
	u, err := usage(proc, tid)
	if err != nil {
		return Usage{}, fmt.Errorf("usage of thread %d: %w", tid, err)
	}
	return u, nil
}

// CPUs is a set of CPUs.
type CPUs = unix.CPUSet

// AllowedTo returns the CPUs on which a thread may run now, by its own affinity and its cpuset. tid
// is an id in the caller's pid namespace.
func AllowedTo(tid int) (set CPUs, err error) {
	if err = unix.SchedGetaffinity(tid, &set); err != nil {
		return set, fmt.Errorf("affinity of thread %d: %w", tid, err)
	}
	return set, nil
}
