package sched

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

type affinity struct {
	proc   string
	thread Thread
}

func (a affinity) Ref() journal.Ref {
	return journal.Ref{Kind: KindAffinity, Object: fmt.Sprintf("%d:%d", a.thread.TID, a.thread.Start)}
}

func (a affinity) Read() (string, error) {
	var set unix.CPUSet
	err := unix.SchedGetaffinity(a.thread.TID, &set)
	if err == nil {
		err = a.thread.check(a.proc)
	}
	if err != nil {
		return "", fmt.Errorf("affinity of kernel thread %d: %w", a.thread.TID, gone(err))
	}
	var cpus []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cgroup.FormatCPUs(cpus), nil
}

func (a affinity) Write(list string) error {
	if err := a.write(list); err != nil {
		return fmt.Errorf("set affinity of kernel thread %d to %q: %w", a.thread.TID, list, gone(err))
	}
	return nil
}

func (a affinity) write(list string) error {
	cpus, err := cgroup.ParseCPUs(list)
	if err != nil {
		return err
	}
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c) // ignores CPUs beyond its 1024
	}
	if set.Count() != len(cpus) || len(cpus) == 0 {
		return errors.New("no CPU, or one above 1023")
	}
	if err := a.thread.check(a.proc); err != nil {
		return err
	}
	return unix.SchedSetaffinity(a.thread.TID, &set)
}
