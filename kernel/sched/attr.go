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
