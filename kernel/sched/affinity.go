package sched

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Affinity returns the knob of a kernel thread's affinity, as a list in the form of
// cgroup.FormatCPUs. Threads that the kernel has bound to a CPU refuse a change.
func Affinity(proc string, t Thread) journal.Knob {
	name := fmt.Sprintf("affinity of kernel thread %d", t.TID)
	return knob{
		proc: proc, thread: t, kind: KindAffinity, reads: name, writes: "set " + name + " to %q",
		read: func() (string, error) {
			var set CPUs
			if err := unix.SchedGetaffinity(t.TID, &set); err != nil {
				return "", err
			}
			var cpus []int
			for i := range len(set) * 64 {
				if set.IsSet(i) {
					cpus = append(cpus, i)
				}
			}
			return cgroup.FormatCPUs(cpus), nil
		},
		write: func(list string, check func() error) error {
			set, err := parseSet(list)
			if err == nil {
				err = check()
			}
			if err == nil {
				err = unix.SchedSetaffinity(t.TID, &set)
			}
			return err
		},
	}
}

func parseSet(list string) (set CPUs, err error) {
	cpus, err := cgroup.ParseCPUs(list)
	for _, c := range cpus {
		set.Set(c) // ignores CPUs beyond its 1024
	}
	if err == nil && (set.Count() != len(cpus) || len(cpus) == 0) {
		err = errors.New("no CPU, or one above 1023")
	}
	return set, err
}
