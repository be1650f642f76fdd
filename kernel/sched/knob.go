package sched

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The journal kinds of this package.
const (
	KindKthread  = "kthread"
	KindAffinity = "affinity"
	KindSlice    = "slice"
	KindNice     = "nice"
)

// A kernel thread cannot change its cgroup before it has run for the first time (kernel/kthread.c,
// cgroup_kthread_ready), which on a busy CPU takes a while. Until then the kernel returns EINVAL,
// as it always does for a thread that is bound to its CPU.
const (
	newbornTries = 1000
	newbornWait  = time.Millisecond
)

// Group returns the knob of a kernel thread's cgroup in one hierarchy, which is one of the mount
// directories in l. The value is a directory at or below the mount. A write returns fs.ErrNotExist
// if its directory does not exist, and journal.ErrGone if the thread has ended.
func Group(proc string, l cgroup.Layout, t Thread, hierarchy string) journal.Knob {
	g := group{layout: l, hierarchy: hierarchy}
	return knob{
		proc: proc, thread: t, kind: KindKthread, below: ":" + hierarchy,
		reads: fmt.Sprintf("cgroup of kernel thread %d in %s", t.TID, hierarchy), writes: fmt.Sprintf("move kernel thread %d to cgroup", t.TID) + " %s",
		read:  func() (string, error) { return g.read(proc, t.TID) },
		write: func(dir string, check func() error) error { return g.write(dir, t.TID, check) },
	}
}

// knob is one knob of a thread. The kernel identifies threads only by their number, so the knob
// checks that the number still belongs to the thread.
type knob struct {
	proc   string
	thread Thread
	task   bool // the thread belongs to a process
	kind   string
	below  string // ends the Object of the Ref
	reads  string // names the value in errors
	writes string // names a write likewise, with a verb for the value
	read   func() (string, error)
	write  func(value string, check func() error) error // calls check as late as possible
}

func (k knob) Ref() journal.Ref {
	return journal.Ref{Kind: k.kind, Object: fmt.Sprintf("%d:%d%s", k.thread.TID, k.thread.Start, k.below)}
}

func (k knob) Read() (string, error) {
	value, err := k.read()
	// Checked after the read, so the value belongs to this thread.
	if other := k.check(); other != nil {
		err = other
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", k.reads, gone(err))
	}
	return value, nil
}

func (k knob) Write(value string) error {
	err := k.write(value, k.check)
	if errors.Is(err, unix.ESRCH) {
		err = gone(err)
	}
	if err != nil {
		return fmt.Errorf(k.writes+": %w", value, err)
	}
	return nil
}

// check returns an error unless the thread is still the same.
func (k knob) check() error {
	switch err := k.thread.check(k.proc); {
	case !k.task:
		return err
	case err == nil:
		return errors.New("a kernel thread")
	case errors.Is(err, errNotKernel):
		return nil
	default:
		return err
	}
}

// OpenKnob opens a knob that an earlier process wrote into the journal. Errors: journal.ErrGone,
// when the thread has ended.
func OpenKnob(proc string, l cgroup.Layout, ref journal.Ref) (journal.Knob, error) {
	k, err := parseRef(proc, l, ref)
	if err == nil {
		err = k.check()
	}
	if err != nil {
		return nil, fmt.Errorf("open knob %s %q: %w", ref.Kind, ref.Object, err)
	}
	return k, nil
}

func parseRef(proc string, l cgroup.Layout, ref journal.Ref) (k knob, err error) {
	number, rest, _ := strings.Cut(ref.Object, ":")
	start, hierarchy, _ := strings.Cut(rest, ":")
	tid, err := strconv.ParseInt(number, 10, 32)
	if err != nil || tid <= 0 {
		return k, fmt.Errorf("bad tid %q", number)
	}
	t := Thread{TID: int(tid)}
	if t.Start, err = strconv.ParseUint(start, 10, 64); err != nil {
		return k, fmt.Errorf("bad start time %q", start)
	}
	open := map[string]func(string, Thread) journal.Knob{
		KindAffinity: Affinity, KindSlice: Slice, KindNice: Nice, KindDeadline: Deadline,
		KindKthread: func(proc string, t Thread) journal.Knob { return Group(proc, l, t, hierarchy) },
	}[ref.Kind]
	if open == nil {
		return k, errors.New("unknown kind")
	}
	if k = open(proc, t).(knob); k.Ref() != ref {
		return k, errors.New("not as it is written")
	}
	return k, nil
}

type group struct {
	layout    cgroup.Layout
	hierarchy string
}

func (g group) read(proc string, tid int) (string, error) {
	paths, err := g.layout.OfPID(proc, tid)
	if err != nil {
		return "", err
	}
	dir, err := g.pick(paths)
	if err == nil && dir == "" {
		err = cgroup.ErrOutside
	}
	return dir, err
}

// pick returns the thread's cgroup in the knob's hierarchy.
func (g group) pick(p cgroup.Paths) (string, error) {
	switch g.hierarchy {
	case "":
	case g.layout.V2:
		return p.V2, nil
	case g.layout.CPU:
		return p.CPU, nil
	case g.layout.CPUSet:
		return p.CPUSet, nil
	case g.layout.IO:
		return p.IO, nil
	}
	return "", errors.New("no such hierarchy is mounted")
}

func (g group) write(dir string, tid int, check func() error) error {
	if _, err := g.pick(cgroup.Paths{}); err != nil {
		return err
	}
	if filepath.Clean(dir) != dir || dir != g.hierarchy && !strings.HasPrefix(dir, g.hierarchy+"/") {
		return fmt.Errorf("not a clean path in hierarchy %s", g.hierarchy)
	}
	name := "tasks" // moves one thread
	if g.hierarchy == g.layout.V2 {
		name = "cgroup.procs" // moves a process: a kernel thread is one by itself
	}
	path := filepath.Join(dir, name)
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_WRONLY | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	for range newbornTries {
		// Checked as late as possible: the kernel takes only the number.
		if err := check(); err != nil {
			return err
		}
		_, err = f.WriteString(strconv.Itoa(tid))
		if !errors.Is(err, unix.EINVAL) {
			break
		}
		time.Sleep(newbornWait)
	}
	if errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w (removed meanwhile)", os.ErrNotExist)
	}
	return err
}
