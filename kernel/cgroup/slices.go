package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindSlices is the journal kind of the slices of a cgroup's threads.
const KindSlices = "slices"

// The values of a slices knob.
const (
	ShortSlices = "short"
	ownSlices   = "own"
)

// shortSlice is the threads' slice: the least that the kernel takes, plus a nanosecond that
// distinguishes ours from slices that a thread requested itself.
const shortSlice = 100*time.Microsecond + time.Nanosecond

// maxSliced limits how many threads of a cgroup get it.
const maxSliced = 1024

// Slices returns the knob of the slices of the threads in a cgroup v2 directory and in those below,
// which [Threads] lists: the time that each requests for one turn (Linux 6.12). With [ShortSlices],
// a thread that wakes up preempts others as soon as its cgroup's weight permits, because the
// cgroup's slice is the shortest of its threads' slices (EEVDF, kernel/sched/fair.c). Threads that
// have requested a slice themselves keep it. Threads that are created later inherit the short
// slice, or get it from the next [Shorten]. Errors of Write: errors.ErrUnsupported before 6.12.
func Slices(dir string) journal.Knob { return slicesOf(dir) }

type slicesOf string

func (k slicesOf) Ref() journal.Ref {
	return journal.Ref{Kind: KindSlices, Object: filepath.Join(string(k), threadsFile)}
}

func (k slicesOf) Read() (string, error) {
	is := ownSlices
	err := k.each(func(_ int, a *unix.SchedAttr) error {
		if a.Runtime == uint64(shortSlice) {
			is = ShortSlices
		}
		return nil
	})
	return is, err
}

func (k slicesOf) Write(to string) error {
	switch to {
	case ShortSlices:
		return Shorten(string(k))
	case ownSlices:
		return k.lengthen()
	}
	return fmt.Errorf("write slices of %s: %q is neither %s nor %s", string(k), to, ShortSlices, ownSlices)
}

// lengthen gives threads with our slice the kernel's own. A thread with ours may have created
// another before it is reached.
func (k slicesOf) lengthen() error {
	for range 4 {
		found := false
		err := k.each(func(tid int, a *unix.SchedAttr) error {
			if a.Runtime != uint64(shortSlice) {
				return nil
			}
			found, a.Runtime = true, 0
			return unix.SchedSetAttr(tid, a, 0)
		})
		if err != nil || !found {
			return err
		}
	}
	return fmt.Errorf("slices of %s: it makes threads faster than they can be reached", string(k))
}

// Shorten sets the slice of [ShortSlices] for the threads of a cgroup v2 directory, and of those
// below, that have the kernel's own. Errors: journal.ErrGone, also if no thread has the kernel's
// own or this one; errors.ErrUnsupported before Linux 6.12.
func Shorten(dir string) error {
	own, err := ownSlice()
	if err != nil {
		return fmt.Errorf("slices of %s: %w", dir, err)
	}
	found := false
	err = slicesOf(dir).each(func(tid int, a *unix.SchedAttr) error {
		if found = found || a.Runtime == uint64(shortSlice); a.Runtime != own {
			return nil
		}
		found, a.Runtime = true, uint64(shortSlice)
		return unix.SchedSetAttr(tid, a, 0)
	})
	if err == nil && !found {
		err = fmt.Errorf("slices of %s: %w: no thread has the kernel's own", dir, journal.ErrGone)
	}
	return err
}

// Relax makes a real-time thread ordinary, with the slice of [ShortSlices].
func Relax(tid int) error { return demote(tid, shortSlice) }

// ownSlice returns the slice of a thread that has requested none.
func ownSlice() (slice uint64, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr}, 0)
		a, rerr := unix.SchedGetAttr(0, 0)
		if err = errors.Join(err, rerr); err == nil && a.Runtime == 0 {
			err = fmt.Errorf("%w: they need Linux 6.12", errors.ErrUnsupported)
		}
		if err == nil {
			slice = a.Runtime
		}
	}()
	<-done
	return slice, err
}

// each calls do for the threads of the fair class. It leaves out threads that end meanwhile.
func (k slicesOf) each(do func(tid int, a *unix.SchedAttr) error) error {
	tids, err := Threads(string(k), maxSliced)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		a, err := unix.SchedGetAttr(tid, 0)
		if err == nil && (a.Policy == unix.SCHED_NORMAL || a.Policy == unix.SCHED_BATCH) {
			err = do(tid, a)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("slice of thread %d: %w", tid, err)
		}
	}
	return nil
}
