package sched

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// NoSlice is the value of the knob Slice where the kernel has no slices of a
// thread's own, which came with 6.12, or where the thread is not of the fair
// class. Such a knob is not to be turned.
const NoSlice = "0"

// FormatSlice returns a slice as the knob's value, in nanoseconds.
func FormatSlice(d time.Duration) string { return strconv.FormatInt(d.Nanoseconds(), 10) }

// Slice returns the knob of a kernel thread's slice: how long it asks to run at
// a time. A thread with a short one gets its turn sooner, and no more of the CPU
// (EEVDF, kernel/sched/fair.c). The kernel keeps it between 0.1 and 100 ms.
func Slice(proc string, t Thread) journal.Knob { return slice{proc: proc, thread: t} }

type slice struct {
	proc   string
	thread Thread
}

func (s slice) Ref() journal.Ref {
	return journal.Ref{Kind: KindSlice, Object: fmt.Sprintf("%d:%d", s.thread.TID, s.thread.Start)}
}

func (s slice) Read() (string, error) {
	attr, err := s.attr()
	if err != nil {
		return "", fmt.Errorf("slice of kernel thread %d: %w", s.thread.TID, gone(err))
	}
	if attr.Policy != unix.SCHED_NORMAL && attr.Policy != unix.SCHED_BATCH {
		return NoSlice, nil
	}
	return strconv.FormatUint(attr.Runtime, 10), nil
}

func (s slice) Write(value string) error {
	if err := s.write(value); err != nil {
		return fmt.Errorf("set slice of kernel thread %d to %q: %w", s.thread.TID, value, gone(err))
	}
	return nil
}

func (s slice) write(value string) error {
	ns, err := strconv.ParseUint(value, 10, 63)
	if err != nil {
		return errors.New("not a number of nanoseconds")
	}
	// The same call sets the nice value, so pass the present one.
	attr, err := s.attr()
	if err != nil {
		return err
	}
	attr.Runtime = ns
	return unix.SchedSetAttr(s.thread.TID, attr, 0)
}

func (s slice) attr() (*unix.SchedAttr, error) {
	attr, err := unix.SchedGetAttr(s.thread.TID, 0)
	if err != nil {
		return nil, err
	}
	// Checked after reading, so that the value is known to be this thread's.
	return attr, s.thread.check(s.proc)
}
