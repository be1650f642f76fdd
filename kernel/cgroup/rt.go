package cgroup

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindRT is the journal kind of a cgroup's real-time budget.
const KindRT = "rt"

// RT returns the knob of the real-time budget of a cgroup v1 directory: how many microseconds of
// each period (see RTPeriod) its real-time tasks may run. With "0", the kernel's default, no task
// of the group can become real-time, and no real-time task can enter.
//
// A write of "0" demotes the group's real-time tasks first, because the kernel refuses the write
// while there are any (EBUSY). All of them became real-time under our budget. Set the budgets of
// the groups below to 0 first, and give those above enough; else the kernel returns EINVAL. Errors
// of Read: errors.ErrUnsupported where the kernel has no real-time groups (CONFIG_RT_GROUP_SCHED),
// and on cgroup v2.
func RT(dir string) journal.Knob { return rt(dir) }

const rtFile = "cpu.rt_runtime_us"

// RTPeriod returns the period of a cgroup v1 directory's budget: a second, unless the host's owner
// has set another.
func RTPeriod(dir string) (time.Duration, error) {
	text, err := value(dir, "cpu.rt_period_us")
	if errors.Is(err, errNoFile) {
		return time.Second, nil
	}
	if err != nil {
		return 0, err
	}
	p, err := parseMicros(text)
	if err == nil && p == 0 {
		err = errors.New("it is 0")
	}
	if err != nil {
		return 0, fmt.Errorf("real-time period of %s: %w", dir, err)
	}
	return p, nil
}

type rt string

func (k rt) file() journal.Knob { return File(filepath.Join(string(k), rtFile)) }

func (k rt) Ref() journal.Ref { return journal.Ref{Kind: KindRT, Object: k.file().Ref().Object} }

func (k rt) Read() (string, error) {
	text, err := value(string(k), rtFile)
	if errors.Is(err, errNoFile) {
		return "", fmt.Errorf("%s of %s: %w: it needs real-time groups of cgroup v1", rtFile, string(k), errors.ErrUnsupported)
	}
	return text, err
}

func (k rt) Write(to string) error {
	if _, err := strconv.ParseUint(to, 10, 31); err != nil {
		return fmt.Errorf("write %s of %s: %q is no number of microseconds", rtFile, string(k), to)
	}
	if to != "0" {
		return k.file().Write(to)
	}
	// A real-time task may create another one before it is demoted.
	for pass := 0; ; pass++ {
		if err := k.demote(); err != nil {
			return fmt.Errorf("demote tasks of %s: %w", string(k), err)
		}
		err := k.file().Write(to)
		if !errors.Is(err, unix.EBUSY) || pass == 3 {
			return err
		}
	}
}

// demote makes a thread ordinary. It gets the nice value that it had before it was real-time, and
// the given slice; 0 is the kernel's own.
func demote(tid int, slice time.Duration) error {
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, tid) // sched_getattr returns the nice value of ordinary threads only
	if err != nil {
		return err
	}
	const none = 20 // the system call gives 20 minus the nice value
	return unix.SchedSetAttr(tid, &unix.SchedAttr{
		Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Nice: int32(none - raw), Runtime: uint64(slice),
	}, 0)
}

// demote makes all real-time tasks of the group ordinary, including those that are ordinary for a
// moment between two real-time turns.
func (k rt) demote() error {
	tids, err := threads(filepath.Join(string(k), "tasks"), math.MaxInt)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		attr, err := unix.SchedGetAttr(tid, 0)
		if err == nil && (attr.Policy == unix.SCHED_RR || attr.Policy == unix.SCHED_FIFO || attr.Policy == unix.SCHED_NORMAL && attr.Runtime == uint64(shortSlice)) {
			err = demote(tid, 0)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("task %d: %w", tid, err)
		}
	}
	return nil
}
