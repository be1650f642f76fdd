package netdev

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/mountinfo"
)

// ErrNoNS means that no process and no bind mount leads to a namespace.
var ErrNoNS = errors.New("no path to network namespace")

// errCutOff means that no path to a namespace was found, but not everything was examined: the
// namespace may exist.
var errCutOff = errors.New("not all processes and mounts could be looked through")

// bounds limit a look at all processes. A process that may make a mount namespace may make many,
// with many mounts.
type bounds struct{ processes, tables, mounts int }

func ordinary() bounds { return bounds{processes: 32768, tables: 8192, mounts: 1 << 18} }

// Finder finds paths to network namespaces. It looks again only for a namespace that it has not
// seen before: first at its own namespace and mounts, then at all processes, and then, at most once
// a second, at the mount tables of other mount namespaces (possibly one per container). It is safe
// for concurrent use.
type Finder struct {
	proc    string
	now     func() time.Time
	once    bool
	watched *Monitor // may be nil
	bounds  bounds

	mu     sync.Mutex
	own    *look // our own namespace and mounts; nil: not looked yet
	near   *look // the processes; nil: not looked yet
	far    *look // mount tables of other namespaces; nil: not looked yet
	looked time.Time
	others []string // the processes of these tables
}

// look is the result of one look.
type look struct {
	found map[uint64][]string // paths by inode; the first is the best
	cut   bool                // not everything was examined
}

// NewFinder makes a Finder; now is its clock.
func NewFinder(proc string, now func() time.Time) *Finder {
	return &Finder{proc: proc, now: now, bounds: ordinary()}
}

// NewGlance makes a Finder that looks once, at its first use. It does not look for a namespace that
// watched (which may be nil) has open. It looks again only for a namespace that has gone since, and
// not for one that it did not see. It is for callers that work through a list of earlier entries
// and then discard the Finder.
func NewGlance(proc string, watched *Monitor) *Finder {
	f := NewFinder(proc, time.Now)
	f.once, f.watched = true, watched
	return f
}

// Find returns a path to the network namespace with the given inode: a bind mount (in /run/netns,
// say), which outlives processes, proc/PID/ns/net, or a bind mount in the mount namespace of a
// process. It may return a path of an earlier look; in the worst case it reads all of proc. The
// error matches [ErrNoNS] if there is none, or errCutOff; an open file or a socket alone may also
// keep a namespace alive.
func (f *Finder) Find(inode uint64) (string, error) {
	paths, err := f.paths(inode)
	if err != nil {
		return "", err
	}
	return paths[0], nil
}

// paths returns one or more paths that appear to lead to a namespace. Another mount may cover a
// path, so that it leads elsewhere.
func (f *Finder) paths(inode uint64) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range []*look{f.own, f.near, f.far} {
		if l != nil && len(l.found[inode]) > 0 {
			return l.found[inode], nil
		}
	}
	if f.own == nil || !f.once {
		f.own = newLook()
		own := filepath.Join(f.proc, "self", "ns", "net")
		if inode, err := linkInode(own); err == nil {
			f.own.see(inode, own) // even if something is mounted over it
		}
		f.own.mounted(f.proc, []string{"self"}, f.bounds)
		if paths := f.own.found[inode]; len(paths) > 0 {
			return paths, nil
		}
	}
	if f.near == nil || !f.once {
		f.near = newLook()
		var err error
		if f.others, err = f.near.lived(f.proc, f.bounds); err != nil {
			f.near = nil
			return nil, fmt.Errorf("find netns %d: %w", inode, err)
		}
		if paths := f.near.found[inode]; len(paths) > 0 {
			return paths, nil
		}
	}
	if now := f.now(); f.far == nil || !f.once && now.Sub(f.looked) >= time.Second {
		f.looked, f.far = now, newLook()
		f.far.mounted(f.proc, f.others, f.bounds)
	}
	if paths := f.far.found[inode]; len(paths) > 0 {
		return paths, nil
	}
	if f.own.cut || f.near.cut || f.far.cut {
		return nil, fmt.Errorf("find netns %d: %w", inode, errCutOff)
	}
	return nil, fmt.Errorf("find netns %d: %w", inode, ErrNoNS)
}

// Open opens the network namespace with the given inode, through path if that leads to it ("" does
// not), otherwise through the paths of [Finder.Find], until one leads to it. It checks that after
// opening: paths come and go with containers, and a process may choose some of them. Errors:
// [ErrNoNS], errCutOff.
func (f *Finder) Open(path string, inode uint64) (*NS, error) {
	if ns := f.watched.Open(inode); ns != nil {
		return ns, nil
	}
	const tries = 3 // the first may return old paths
	paths := []string{path}
	for try := 0; ; try++ {
		var failed error
		for _, path := range paths {
			if path == "" {
				continue
			}
			ns, err := Open(path)
			if err == nil && ns.Inode() == inode {
				return ns, nil
			}
			if err == nil {
				ns.Close()
			} else if try > 0 && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNotNS) && !errors.Is(err, unix.EAGAIN) {
				failed = err // EAGAIN is the answer while the mount is being removed
			}
		}
		if failed != nil {
			return nil, failed
		}
		if try == tries {
			return nil, fmt.Errorf("open netns %d: no path that is shown leads to it", inode)
		}
		if try > 0 {
			f.forget() // it has gone since
		}
		var err error
		if paths, err = f.paths(inode); err != nil {
			return nil, err
		}
	}
}

// forget makes the next Find look again.
func (f *Finder) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.own, f.near, f.far = nil, nil, nil
}

// All returns paths to each network namespace that a process lives in, or sees a bind mount of, by
// inode. A Docker Engine in a container, or a service with private mounts, has its bridges there. A
// mount precedes a process, which may only be there for a moment, such as a thread of an engine
// that works in one of its networks. All takes long.
func All(proc string) map[uint64][]string {
	l, living := newLook(), newLook()
	others, _ := living.lived(proc, ordinary())
	l.mounted(proc, others, ordinary())
	for inode, paths := range living.found {
		l.found[inode] = append(l.found[inode], paths...)
	}
	return l.found
}

func newLook() *look { return &look{found: make(map[uint64][]string)} }

// mostPaths limits the paths to one namespace: many processes live in one.
const mostPaths = 8

// see notes a path to a namespace.
func (l *look) see(inode uint64, path string) {
	if len(l.found[inode]) < mostPaths {
		l.found[inode] = append(l.found[inode], path)
	}
}

// lived records the namespaces of processes. others holds one process of each mount namespace
// except our own.
func (l *look) lived(proc string, b bounds) (others []string, err error) {
	d, err := os.Open(proc)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	seen := make(map[string]bool) // mount namespaces
	if own, err := os.Readlink(filepath.Join(proc, "self", "ns", "mnt")); err == nil {
		seen[own] = true
	}
	for n := 0; ; {
		names, err := d.Readdirnames(256)
		for _, name := range names {
			if _, err := strconv.Atoi(name); err != nil {
				continue
			}
			if n++; n > b.processes {
				l.cut = true
				return others, nil
			}
			path := filepath.Join(proc, name, "ns", "net")
			inode, err := linkInode(path)
			if err == nil {
				l.see(inode, path)
			}
			mnt, merr := os.Readlink(filepath.Join(proc, name, "ns", "mnt"))
			// Some hosts have processes that root may not look at, for good.
			l.cut = l.cut || !ended(err) && !errors.Is(err, fs.ErrPermission) || !ended(merr) && !errors.Is(merr, fs.ErrPermission)
			if merr != nil || seen[mnt] {
				continue
			}
			if len(others) == b.tables {
				l.cut = true
				continue
			}
			seen[mnt] = true
			others = append(others, name)
		}
		if err != nil {
			l.cut = l.cut || !errors.Is(err, io.EOF)
			return others, nil
		}
	}
}

// ended reports whether an error about a file of a process is nil, or means only that the process
// has ended.
func ended(err error) bool {
	return err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

// Mounted returns the network namespaces that are bind-mounted in the mount namespace of a process
// (a PID, or "self"), by inode, with their paths from here. Docker's overlay networks, for one, are
// found in no other way: no process lives in them. Another mount may hide a path, so that it leads
// elsewhere. A process that has ended has none.
func Mounted(proc, pid string) map[uint64][]string {
	l := newLook()
	l.mounted(proc, []string{pid}, ordinary())
	return l.found
}

// mounted is Mounted for some processes.
func (l *look) mounted(proc string, pids []string, b bounds) {
	left := b.mounts
	for _, pid := range pids {
		root := ""
		if pid != "self" {
			root = filepath.Join(proc, pid, "root")
		}
		// If reading a table fails, what was read before counts.
		err := mountinfo.Read(proc, pid, func(m mountinfo.Mount) bool {
			if left--; left < 0 {
				l.cut = true
				return false
			}
			if m.Type == "nsfs" {
				if inode, ok := parseNSLink(m.Root); ok {
					l.see(inode, root+m.Dir)
				}
			}
			return true
		})
		l.cut = l.cut || !ended(err) && !errors.Is(err, unix.EINVAL) // the error of a process that has ended
	}
}

// InodeOf returns the inode of the network namespace of a process. An error matches fs.ErrNotExist
// if the process has ended.
func InodeOf(proc string, pid int) (uint64, error) {
	ino, err := linkInode(filepath.Join(proc, strconv.Itoa(pid), "ns", "net"))
	if err != nil {
		return 0, fmt.Errorf("netns of process %d: %w", pid, err)
	}
	return ino, nil
}

func linkInode(path string) (uint64, error) {
	target, err := os.Readlink(path)
	if err != nil {
		return 0, err
	}
	ino, ok := parseNSLink(target)
	if !ok {
		return 0, fmt.Errorf("unexpected link %q", target)
	}
	return ino, nil
}

// parseNSLink reads the form "net:[4026531840]".
func parseNSLink(s string) (uint64, bool) {
	s, begins := strings.CutPrefix(s, "net:[")
	s, ends := strings.CutSuffix(s, "]")
	ino, err := strconv.ParseUint(s, 10, 64)
	return ino, begins && ends && err == nil
}
