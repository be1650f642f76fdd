package sched

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindDeadline is the journal kind of a thread's scheduling policy; see Deadline.
const KindDeadline = "deadline"

// minRuntime is the smallest runtime that the kernel takes (DL_SCALE, kernel/sched/deadline.c).
const minRuntime = 1024 * time.Nanosecond

// The prefixes of Deadline's values.
const ordinary, batch, onDeadline = "normal ", "batch ", "deadline "

// RoundRobin is the value of Deadline for a thread of SCHED_RR at the lowest priority with ordinary
// children. Its cgroup needs a real-time budget, on kernels with real-time budgets for cgroups.
const RoundRobin = "rr 1"

// FindTask returns the thread with this tid, whether it belongs to a process or to the kernel.
// Error: journal.ErrGone.
func FindTask(proc string, tid int) (Thread, error) {
	s, err := StatOf(proc, tid)
	if err != nil {
		return Thread{}, fmt.Errorf("thread %d: %w", tid, err)
	}
	return Thread{TID: tid, Start: s.Start}, nil
}

// Ran returns how long a thread of a process has run. Error: journal.ErrGone.
func Ran(proc string, tid int) (time.Duration, error) {
	if u, err := usage(proc, tid); err == nil {
		return u.Ran, nil
	}
	s, err := StatOf(proc, tid)
	if err != nil {
		return 0, fmt.Errorf("cpu time of thread %d: %w", tid, err)
	}
	return time.Duration(s.cpu) * time.Second / ticks, nil
}

// FormatDeadline returns the value of Deadline for a thread that may run for runtime in each
// period, ahead of all other classes, and no longer.
func FormatDeadline(runtime, period time.Duration) string {
	return fmt.Sprintf("%s%d/%d", onDeadline, runtime.Nanoseconds(), period.Nanoseconds())
}

// ParseDeadline returns the runtime and period of such a value. ok is false for any other value.
func ParseDeadline(value string) (runtime, period time.Duration, ok bool) {
	_, err := fmt.Sscanf(value, onDeadline+"%d/%d", &runtime, &period)
	ok = err == nil && runtime >= minRuntime && runtime <= period && FormatDeadline(runtime, period) == value
	return runtime, period, ok
}

// Ordinary reports whether a value of Deadline means a thread that is not real-time, and that may
// become real-time.
func Ordinary(value string) bool {
	return strings.HasPrefix(value, ordinary) || strings.HasPrefix(value, batch)
}

// Deadline returns the knob of the scheduling policy of a process's thread. FormatDeadline's value
// makes the thread SCHED_DEADLINE: the kernel itself throttles it once it has used its runtime
// (CBS), on any kernel and without cgroups, also after the agent was killed. Its children are
// ordinary (RESET_ON_FORK). The knob saves the thread's policy and nice value, but not its slice
// (Linux 6.12). Values other than these, "normal NICE", "batch NICE" and RoundRobin are read-only.
//
// Errors of Write: EPERM for a thread that may not use all CPUs, EBUSY when the kernel's bandwidth
// for such threads is exhausted (sched_rt_runtime_us).
func Deadline(proc string, t Thread) journal.Knob {
	name := fmt.Sprintf("policy of thread %d", t.TID)
	return knob{
		proc: proc, thread: t, task: true, kind: KindDeadline, reads: name, writes: "set " + name + " to %q",
		read: func() (string, error) {
			attr, err := unix.SchedGetAttr(t.TID, 0)
			if err != nil {
				return "", err
			}
			return formatPolicy(attr), nil
		},
		write: func(value string, check func() error) error {
			attr, err := parsePolicy(value)
			if err == nil {
				err = check()
			}
			if err == nil {
				err = unix.SchedSetAttr(t.TID, &attr, 0)
			}
			return err
		},
	}
}

func formatPolicy(attr *unix.SchedAttr) string {
	forks := attr.Flags&unix.SCHED_FLAG_RESET_ON_FORK == 0
	switch {
	case attr.Policy == unix.SCHED_NORMAL && forks:
		return ordinary + strconv.Itoa(int(attr.Nice))
	case attr.Policy == unix.SCHED_BATCH && forks:
		return batch + strconv.Itoa(int(attr.Nice))
	case attr.Policy == unix.SCHED_RR && attr.Priority == 1 && !forks:
		return RoundRobin
	case attr.Policy == unix.SCHED_DEADLINE && !forks && attr.Deadline == attr.Period:
		return FormatDeadline(time.Duration(attr.Runtime), time.Duration(attr.Period))
	}
	return fmt.Sprintf("policy %d, priority %d, flags %#x, %d/%d/%d", attr.Policy, attr.Priority, attr.Flags, attr.Runtime, attr.Deadline, attr.Period)
}

func parsePolicy(value string) (attr unix.SchedAttr, err error) {
	attr.Size = unix.SizeofSchedAttr
	var nice int32
	if run, period, ok := ParseDeadline(value); ok {
		attr.Policy, attr.Flags = unix.SCHED_DEADLINE, unix.SCHED_FLAG_RESET_ON_FORK
		attr.Runtime, attr.Deadline, attr.Period = uint64(run), uint64(period), uint64(period)
	} else if value == RoundRobin {
		attr.Policy, attr.Priority, attr.Flags = unix.SCHED_RR, 1, unix.SCHED_FLAG_RESET_ON_FORK
	} else if _, err := fmt.Sscanf(value, ordinary+"%d", &nice); err == nil {
		attr.Policy, attr.Nice = unix.SCHED_NORMAL, nice
	} else if _, err := fmt.Sscanf(value, batch+"%d", &nice); err == nil {
		attr.Policy, attr.Nice = unix.SCHED_BATCH, nice
	} else {
		return attr, errors.New("none that is written")
	}
	return attr, nil
}

// TryDeadline reports whether this kernel has SCHED_DEADLINE and this process may use it. It makes
// a thread of its own SCHED_DEADLINE for a moment. The error names the obstacle. The thread becomes
// ordinary before it does anything else: a tick that finds it beyond its runtime throttles it for
// as many periods as the tick is longer, and blocks its waiters for as long.
func TryDeadline() error {
	tried := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var all unix.CPUSet
		all.Fill()
		ordinary := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}
		aff := unix.SchedSetaffinity(0, &all)
		err := unix.SchedSetAttr(0, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_DEADLINE, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
			Runtime: uint64(time.Millisecond), Deadline: uint64(100 * time.Millisecond), Period: uint64(100 * time.Millisecond),
		}, 0)
		if err == nil {
			err = unix.SchedSetAttr(0, &ordinary, 0)
		}
		tried <- errors.Join(aff, err)
	}()
	return ExplainDeadline(<-tried)
}

// ExplainDeadline adds the cause on this host to an error of Deadline; nil stays nil.
func ExplainDeadline(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: the kernel gives SCHED_DEADLINE only to threads that may use all CPUs: without taskset, cpuset.cpus or sched_rt_runtime_us=0", err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: the kernel's bandwidth for SCHED_DEADLINE is given out (kernel.sched_rt_runtime_us)", err)
	}
	return err
}
