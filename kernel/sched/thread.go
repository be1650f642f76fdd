// Package sched finds the kernel's own threads, and has four knobs for each: its cgroup, which the
// scheduler charges for it, its affinity, its slice and its nice value.
//
// It also reads a kernel thread's usage.
//
// Threads of processes belong to the process that started them. The package changes only their
// scheduling policy, in deadline.go. It knows neither devices nor containers: feature/netcpu knows
// for which container a thread works, and turns the knobs through package journal.
package sched

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

var (
	// errNotKernel is returned for a thread that belongs to a process.
	errNotKernel = errors.New("not a kernel thread")
	// ErrHidden is returned where kernel threads are not visible: in a pid namespace that is
	// not the host's.
	ErrHidden = errors.New("kernel threads are not visible in this pid namespace")
)

const (
	kthreadd     = 2          // parent of all kernel threads
	pfKthread    = 0x00200000 // PF_KTHREAD, include/linux/sched.h
	ticks        = 100        // USER_HZ, the same on all architectures that Go knows
	maxStat      = 4096       // longer than any one-line file that is read here
	listAttempts = 3
)

// Thread identifies one kernel thread for as long as it lives: a TID alone may be reused.
type Thread struct {
	TID   int
	Start uint64 // in clock ticks since boot, as in proc
}

// Named is a kernel thread and its name, such as "napi/eth0-8193".
type Named struct {
	Thread
	Comm string
}

// Find returns the kernel thread with this tid. Errors: journal.ErrGone,
// errNotKernel.
func Find(proc string, tid int) (Thread, error) {
	s, err := readStat(proc, tid)
	if err != nil {
		return Thread{}, fmt.Errorf("kernel thread %d: %w", tid, err)
	}
	return Thread{TID: tid, Start: s.Start}, nil
}

// Threads returns the kernel threads with a name that begins with prefix. It costs one small read for
// each kernel thread of the host. Error: ErrHidden.
func Threads(proc, prefix string) ([]Named, error) {
	var list []Named
	for range listAttempts {
		tids, err := children(proc)
		if err != nil {
			return nil, fmt.Errorf("list kernel threads: %w", err)
		}
		list = list[:0]
		whole := true
		for _, tid := range tids {
			comm, err := readComm(proc, tid)
			if err == nil && strings.HasPrefix(comm, prefix) {
				var t Thread
				if t, err = Find(proc, tid); err == nil {
					list = append(list, Named{t, comm})
				}
			}
			if errors.Is(err, journal.ErrGone) {
				whole = false
			} else if err != nil && !errors.Is(err, errNotKernel) {
				return nil, fmt.Errorf("list kernel threads: %w", err)
			}
		}
		// The list of children can miss one when another ends while it is read.
		if whole {
			break
		}
	}
	return list, nil
}

// children returns the threads that kthreadd started.
func children(proc string) ([]int, error) {
	comm, err := readComm(proc, kthreadd)
	if errors.Is(err, journal.ErrGone) || err == nil && comm != "kthreadd" {
		return nil, ErrHidden
	}
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(kthreadd), "task", strconv.Itoa(kthreadd), "children"))
	if errors.Is(err, fs.ErrNotExist) {
		return allTasks(proc) // a kernel without CONFIG_PROC_CHILDREN
	}
	if err != nil {
		return nil, err
	}
	var tids []int
	for f := range bytes.FieldsSeq(text) {
		tid, err := strconv.Atoi(string(f))
		if err != nil {
			return nil, fmt.Errorf("children of kthreadd: bad pid %q", f)
		}
		tids = append(tids, tid)
	}
	return tids, nil
}

// allTasks returns every process. Find selects the kernel's threads among them.
func allTasks(proc string) ([]int, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	var tids []int
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids, nil
}

// Usage is what a thread has done so far.
type Usage struct {
	Ran    time.Duration
	Waited time.Duration // runnable, without a CPU
	Turns  uint64        // how often it got a CPU
}

// UsageOf returns the usage of a kernel thread. Errors: journal.ErrGone; fs.ErrNotExist
// where the kernel does not count (CONFIG_SCHED_INFO).
func UsageOf(proc string, t Thread) (Usage, error) {
	u, err := usage(proc, t.TID)
	// Checked after the read, so the value belongs to this thread. An ended thread has no file, and
	// neither has any thread if the kernel does not count.
	if gone := t.check(proc); gone != nil {
		err = gone
	}
	if err != nil {
		return Usage{}, fmt.Errorf("usage of kernel thread %d: %w", t.TID, err)
	}
	return u, nil
}

// usage reads proc_pid_schedstat (Documentation/scheduler/sched-stats.rst).
func usage(proc string, tid int) (u Usage, err error) {
	text, err := readFile(filepath.Join(proc, strconv.Itoa(tid), "schedstat"))
	if err != nil {
		return u, err
	}
	_, err = fmt.Sscan(string(text), (*int64)(&u.Ran), (*int64)(&u.Waited), &u.Turns)
	return u, err
}

// check returns an error unless t is still that kernel thread.
func (t Thread) check(proc string) error {
	s, err := readStat(proc, t.TID)
	if err != nil && !errors.Is(err, errNotKernel) {
		return err
	}
	if s.Start != t.Start {
		return fmt.Errorf("%w: tid %d is another thread now", journal.ErrGone, t.TID)
	}
	return err
}

// Stat is the part of proc_pid_stat(5) in use, of a process, a thread of one or a kernel thread.
type Stat struct {
	Kernel bool
	Ended  bool   // a zombie, or about to be none
	Start  uint64 // in clock ticks since boot
	cpu    uint64 // utime + stime, in ticks
}

// StatOf reads proc/TID/stat. Error: journal.ErrGone.
func StatOf(proc string, tid int) (Stat, error) {
	text, err := readFile(filepath.Join(proc, strconv.Itoa(tid), "stat"))
	if err != nil {
		return Stat{}, gone(err)
	}
	return parseStat(text)
}

// readStat is StatOf for a kernel thread. The Stat is valid also with errNotKernel.
func readStat(proc string, tid int) (Stat, error) {
	s, err := StatOf(proc, tid)
	if err == nil && !s.Kernel {
		err = errNotKernel
	}
	return s, err
}

// parseStat parses the form of /proc/PID/stat, proc_pid_stat(5). The name in brackets may contain
// anything, brackets and blanks included: the process chooses it.
func parseStat(text []byte) (Stat, error) {
	i := bytes.LastIndexByte(text, ')')
	f := strings.Fields(string(text[i+1:]))
	const first = 3 // the number of f[0] in the manual page
	if i < 0 || len(f) <= 22-first {
		return Stat{}, errors.New("bad stat line")
	}
	var nums [4]uint64
	for i, field := range []int{9, 14, 15, 22} {
		n, err := strconv.ParseUint(f[field-first], 10, 64)
		if err != nil {
			return Stat{}, fmt.Errorf("bad field %d %q in stat line", field, f[field-first])
		}
		nums[i] = n
	}
	// A year has 3.2e9 ticks; more than 100 of them would overflow a Duration.
	if nums[3] > 3e11 {
		return Stat{}, fmt.Errorf("start time %d in stat line", nums[3])
	}
	return Stat{Kernel: nums[0]&pfKthread != 0, Ended: f[0] == "Z" || f[0] == "X", Start: nums[3], cpu: nums[1] + nums[2]}, nil
}

func readComm(proc string, tid int) (string, error) {
	text, err := readFile(filepath.Join(proc, strconv.Itoa(tid), "comm"))
	if err != nil {
		return "", gone(err)
	}
	return strings.TrimSuffix(string(text), "\n"), nil
}

// readFile reads a file of proc that the kernel returns in one piece. It avoids the runtime's
// poller, which costs more than the read.
func readFile(name string) ([]byte, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	var buf [maxStat]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return nil, &fs.PathError{Op: "read", Path: name, Err: err}
	}
	return bytes.Clone(buf[:n]), nil
}

// gone adds journal.ErrGone to the errors of a thread that ended before or after its file was
// opened.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("%w: %w", journal.ErrGone, err)
	}
	return err
}

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
