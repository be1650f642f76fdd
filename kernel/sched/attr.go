package sched

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

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
	return attribute{
		proc: proc, thread: t, kind: KindSlice, none: NoSlice, unit: "nanoseconds",
		get: func(a *unix.SchedAttr) string { return strconv.FormatUint(a.Runtime, 10) },
		set: func(a *unix.SchedAttr, value string) (err error) {
			a.Runtime, err = strconv.ParseUint(value, 10, 63)
			return err
		},
	}
}

// Nice returns the knob of a kernel thread's nice value, from -20 to 19: its weight among the
// threads of its own cgroup.
func Nice(proc string, t Thread) journal.Knob {
	return attribute{
		proc: proc, thread: t, kind: KindNice, none: NoNice, unit: "-20 to 19",
		get: func(a *unix.SchedAttr) string { return strconv.Itoa(int(a.Nice)) },
		set: func(a *unix.SchedAttr, value string) error {
			n, err := strconv.ParseInt(value, 10, 32)
			if err == nil && (n < -20 || n > 19) {
				err = strconv.ErrRange
			}
			a.Nice = int32(n)
			return err
		},
	}
}

// attribute is one of the values that sched_setattr(2) sets together.
type attribute struct {
	proc       string
	thread     Thread
	kind, unit string
	none       string // the value when it cannot be turned
	get        func(*unix.SchedAttr) string
	set        func(*unix.SchedAttr, string) error
}

func (k attribute) Ref() journal.Ref {
	return journal.Ref{Kind: k.kind, Object: fmt.Sprintf("%d:%d", k.thread.TID, k.thread.Start)}
}

func (k attribute) Read() (string, error) {
	attr, err := k.attr()
	if err != nil {
		return "", fmt.Errorf("%s of kernel thread %d: %w", k.kind, k.thread.TID, gone(err))
	}
	if attr.Policy != unix.SCHED_NORMAL && attr.Policy != unix.SCHED_BATCH {
		return k.none, nil
	}
	return k.get(attr), nil
}

func (k attribute) Write(value string) error {
	if err := k.write(value); err != nil {
		return fmt.Errorf("set %s of kernel thread %d to %q: %w", k.kind, k.thread.TID, value, gone(err))
	}
	return nil
}

func (k attribute) write(value string) error {
	// The call sets all attributes, so pass the others unchanged.
	attr, err := k.attr()
	if err != nil {
		return err
	}
	if k.set(attr, value) != nil {
		return errors.New("not a number: " + k.unit)
	}
	return unix.SchedSetAttr(k.thread.TID, attr, 0)
}

func (k attribute) attr() (*unix.SchedAttr, error) {
	attr, err := unix.SchedGetAttr(k.thread.TID, 0)
	if err != nil {
		return nil, err
	}
	// Checked after the read, so the value is known to be this thread's.
	return attr, k.thread.check(k.proc)
}
