package sched

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The values of the knobs Slice and Nice that cannot be turned: the kernel has no slices per
// thread, which came with 6.12, or the thread is not of the fair class.
const (
	NoSlice = "0"
	NoNice  = "none"
)

// FormatSlice returns a slice as the knob's value, in nanoseconds.
func FormatSlice(d time.Duration) string { return strconv.FormatInt(d.Nanoseconds(), 10) }

// Slice returns the knob of a kernel thread's slice: the time that it requests for one turn. A
// thread with a short slice gets its turn sooner, and no larger share of the CPU (EEVDF,
// kernel/sched/fair.c). The kernel keeps it between 0.1 and 100 ms.
func Slice(proc string, t Thread) journal.Knob {
	return attribute(proc, t, KindSlice, NoSlice, "nanoseconds",
		func(a *unix.SchedAttr) string { return strconv.FormatUint(a.Runtime, 10) },
		func(a *unix.SchedAttr, value string) (err error) {
			a.Runtime, err = strconv.ParseUint(value, 10, 63)
			return err
		})
}

// Nice returns the knob of a kernel thread's nice value, from -20 to 19: its weight among the
// threads of its own cgroup.
func Nice(proc string, t Thread) journal.Knob {
	return attribute(proc, t, KindNice, NoNice, "-20 to 19",
		func(a *unix.SchedAttr) string { return strconv.Itoa(int(a.Nice)) },
		func(a *unix.SchedAttr, value string) error {
			n, err := strconv.ParseInt(value, 10, 32)
			if err == nil && (n < -20 || n > 19) {
				err = strconv.ErrRange
			}
			a.Nice = int32(n)
			return err
		})
}

// attribute returns the knob of one of the values that sched_setattr(2) sets together. none is its value
// when it cannot be turned.
func attribute(proc string, t Thread, kind, none, unit string, get func(*unix.SchedAttr) string, set func(*unix.SchedAttr, string) error) journal.Knob {
	name := fmt.Sprintf("%s of kernel thread %d", kind, t.TID)
	return knob{
		proc: proc, thread: t, kind: kind, reads: name, writes: "set " + name + " to %q",
		read: func() (string, error) {
			attr, err := unix.SchedGetAttr(t.TID, 0)
			if err != nil || attr.Policy != unix.SCHED_NORMAL && attr.Policy != unix.SCHED_BATCH {
				return none, err
			}
			return get(attr), nil
		},
		write: func(value string, check func() error) error {
			// The call sets all attributes, so pass the others unchanged.
			attr, err := unix.SchedGetAttr(t.TID, 0)
			if err != nil {
				return err
			}
			if set(attr, value) != nil {
				return errors.New("not a number: " + unit)
			}
			if err := check(); err != nil {
				return err
			}
			return unix.SchedSetAttr(t.TID, attr, 0)
		},
	}
}

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

// BeNice sets the nice value of all threads of this process; later threads and processes inherit it. 0
// changes nothing. If the scheduler groups the tasks of each session (autogroup, see sched(7)), nice
// counts only within a session. So a process that leads a session sets the value of the session, too, and
// one that gives way starts a session if it can. One that goes before others may need its terminal.
func BeNice(n int) error {
	if n == 0 {
		return nil
	}
	if n > 0 {
		if _, err := unix.Setsid(); err != nil && err != unix.EPERM { // EPERM: it leads a process group
			return fmt.Errorf("begin a session: %w", err)
		}
	}
	session, err := unix.Getsid(0)
	if err == nil && session == os.Getpid() {
		err = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(n)), 0)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("set nice value %d of the session: %w", n, err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.Setpriority(unix.PRIO_PROCESS, tid, n); err != nil && err != unix.ESRCH {
			return fmt.Errorf("set nice value %d: %w", n, err)
		}
	}
	return nil
}
