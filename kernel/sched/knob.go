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
	return group{proc: proc, layout: l, thread: t, hierarchy: hierarchy}
}

// Affinity returns the knob of a kernel thread's affinity, as a list in the form of
// cgroup.FormatCPUs. Threads that the kernel has bound to a CPU refuse a change.
func Affinity(proc string, t Thread) journal.Knob { return affinity{proc: proc, thread: t} }

// OpenKnob opens a knob that an earlier process wrote into the journal. Errors: journal.ErrGone,
// when the thread has ended.
func OpenKnob(proc string, l cgroup.Layout, ref journal.Ref) (journal.Knob, error) {
	k, err := parseRef(proc, l, ref)
	if err != nil {
		return nil, fmt.Errorf("open knob %s %q: %w", ref.Kind, ref.Object, err)
	}
	return k, nil
}

func parseRef(proc string, l cgroup.Layout, ref journal.Ref) (journal.Knob, error) {
	parts := strings.SplitN(ref.Object, ":", 3)
	if want := map[string]int{KindKthread: 3, KindAffinity: 2, KindSlice: 2, KindNice: 2}[ref.Kind]; want == 0 {
		return nil, errors.New("unknown kind")
	} else if len(parts) != want {
		return nil, fmt.Errorf("want %d parts", want)
	}
	tid, err := strconv.ParseInt(parts[0], 10, 32)
	if err != nil || tid <= 0 {
		return nil, fmt.Errorf("bad tid %q", parts[0])
	}
	start, err := strconv.ParseUint(parts[1], 10, 64)
	if err != nil {
		return nil, fmt.Errorf("bad start time %q", parts[1])
	}
	t := Thread{TID: int(tid), Start: start}
	if err := t.check(proc); err != nil {
		return nil, err
	}
	switch ref.Kind {
	case KindAffinity:
		return Affinity(proc, t), nil
	case KindSlice:
		return Slice(proc, t), nil
	case KindNice:
		return Nice(proc, t), nil
	}
	return Group(proc, l, t, parts[2]), nil
}

type group struct {
	proc      string
	layout    cgroup.Layout
	thread    Thread
	hierarchy string
}

func (g group) Ref() journal.Ref {
	return journal.Ref{Kind: KindKthread, Object: fmt.Sprintf("%d:%d:%s", g.thread.TID, g.thread.Start, g.hierarchy)}
}

func (g group) Read() (string, error) {
	dir, err := g.read()
	if err != nil {
		return "", fmt.Errorf("cgroup of kernel thread %d in %s: %w", g.thread.TID, g.hierarchy, err)
	}
	return dir, nil
}

func (g group) read() (string, error) {
	paths, err := g.layout.OfPID(g.proc, g.thread.TID)
	if err != nil {
		return "", gone(err)
	}
	// Checked after the read, so the value is known to be this thread's.
	if err := g.thread.check(g.proc); err != nil {
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

func (g group) Write(dir string) error {
	if err := g.write(dir); err != nil {
		return fmt.Errorf("move kernel thread %d to cgroup %s: %w", g.thread.TID, dir, err)
	}
	return nil
}

func (g group) write(dir string) error {
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
		if err := g.thread.check(g.proc); err != nil {
			return err
		}
		_, err = f.WriteString(strconv.Itoa(g.thread.TID))
		if !errors.Is(err, unix.EINVAL) {
			break
		}
		time.Sleep(newbornWait)
	}
	switch {
	case errors.Is(err, unix.ESRCH):
		return gone(err)
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w (removed meanwhile)", os.ErrNotExist)
	}
	return err
}
