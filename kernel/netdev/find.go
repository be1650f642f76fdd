package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/kernel/mountinfo"
)

// ErrNoNS means that no process and no bind mount leads to a namespace.
var ErrNoNS = errors.New("no path to network namespace")

// What a look at all processes is bounded by. Anybody who may make a mount
// namespace may make many, with many mounts.
const (
	maxProcesses = 32768
	maxTables    = 1024    // mount namespaces
	maxMounts    = 1 << 18 // in all of them
)

// Find returns a path by which the network namespace with the given inode can
// be opened now: a bind mount (in /run/netns, say), which outlives processes,
// proc/PID/ns/net, or a bind mount in the mount namespace of a process. It
// reads all of proc in the worst case. The error matches [ErrNoNS] if there is
// none; a namespace may also be kept alive by an open file or a socket alone.
func Find(proc string, inode uint64) (string, error) {
	return NewFinder(proc, time.Now).Find(inode)
}

// Finder is [Find] for those who look for many namespaces one after another: it
// reads the mount tables of other mount namespaces, of which there may be one
// for each container, no more than once a second. It is safe for concurrent use.
type Finder struct {
	proc string
	now  func() time.Time

	mu        sync.Mutex
	elsewhere map[uint64]string // what was found in them
	looked    time.Time
}

// NewFinder makes a Finder; now is its clock.
func NewFinder(proc string, now func() time.Time) *Finder { return &Finder{proc: proc, now: now} }

// Find is [Find].
func (f *Finder) Find(inode uint64) (string, error) {
	if path, ok := Mounted(f.proc, "self")[inode]; ok {
		return path, nil
	}
	found := ""
	others, err := lived(f.proc, func(ino uint64, path string) bool {
		if ino == inode {
			found = path
		}
		return found == ""
	})
	if err != nil {
		return "", fmt.Errorf("find netns %d: %w", inode, err)
	}
	if found != "" {
		return found, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := f.now(); f.elsewhere == nil || now.Sub(f.looked) >= time.Second {
		f.looked, f.elsewhere = now, make(map[uint64]string)
		mountedIn(f.proc, others, f.elsewhere)
	}
	if path, ok := f.elsewhere[inode]; ok {
		return path, nil
	}
	return "", fmt.Errorf("find netns %d: %w", inode, ErrNoNS)
}

// Open opens the network namespace with the given inode, by way of path if that
// leads to it ("" does not), else by what [Finder.Find] finds. Whether a path
// leads to it is looked at after it was opened: paths come and go with
// containers, and some are a process's own to choose. Errors: [ErrNoNS].
func (f *Finder) Open(path string, inode uint64) (*NS, error) {
	for try := 0; ; try++ {
		if path != "" {
			ns, err := Open(path)
			if err == nil && ns.Inode() == inode {
				return ns, nil
			}
			if err == nil {
				ns.Close()
			} else if try > 0 && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNotNS) {
				return nil, err
			}
			if try == 2 {
				return nil, fmt.Errorf("open netns %d: %w", inode, ErrNoNS)
			}
		}
		if try > 0 {
			f.forget() // it has gone since
		}
		var err error
		if path, err = f.Find(inode); err != nil {
			return nil, err
		}
	}
}

// forget makes the next Find look again.
func (f *Finder) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.elsewhere = nil
}

// All returns a path to each network namespace that a process lives in or that
// is bind-mounted where a process can see it, by inode: that is where a Docker
// Engine that runs in a container, or a service with private mounts, has its
// bridges. It takes long.
func All(proc string) map[uint64]string {
	found := make(map[uint64]string)
	others, _ := lived(proc, func(inode uint64, path string) bool {
		if found[inode] == "" {
			found[inode] = path
		}
		return true
	})
	mountedIn(proc, others, found)
	return found
}

// lived calls each with the namespaces that processes live in, until it returns
// false. others is a process of each mount namespace but our own.
func lived(proc string, each func(inode uint64, path string) bool) (others []string, err error) {
	d, err := os.Open(proc)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	seen := make(map[string]bool) // mount namespaces
	if own, err := os.Readlink(filepath.Join(proc, "self", "ns", "mnt")); err == nil {
		seen[own] = true
	}
	for n := 0; n < maxProcesses; {
		// In portions: proc is long, and the answer is often near its start.
		names, err := d.Readdirnames(256)
		n += len(names)
		for _, name := range names {
			if _, err := strconv.Atoi(name); err != nil {
				continue
			}
			path := filepath.Join(proc, name, "ns", "net")
			if inode, ok := linkInode(path); ok && !each(inode, path) {
				return others, nil
			}
			mnt, err := os.Readlink(filepath.Join(proc, name, "ns", "mnt"))
			if err == nil && !seen[mnt] && len(others) < maxTables {
				seen[mnt] = true
				others = append(others, name)
			}
		}
		if err != nil {
			break // the end, in all likelihood
		}
	}
	return others, nil
}

// Mounted returns the network namespaces that are bind-mounted in the mount
// namespace of a process (a PID, or "self"), by inode, with the path of each as
// it is seen from here. Docker's overlay networks, for one, are found in no
// other way: no process lives in them. What is mounted may be hidden by another
// mount, so that the path leads elsewhere. A process that has ended has none.
func Mounted(proc, pid string) map[uint64]string {
	found := make(map[uint64]string)
	mountedIn(proc, []string{pid}, found)
	return found
}

// mountedIn is Mounted for some processes, and adds to what was found.
func mountedIn(proc string, pids []string, found map[uint64]string) {
	left := maxMounts
	for _, pid := range pids {
		root := ""
		if pid != "self" {
			root = filepath.Join(proc, pid, "root")
		}
		// A table that cannot be read to its end still has a beginning.
		mountinfo.Read(proc, pid, func(m mountinfo.Mount) bool {
			if left--; left < 0 {
				return false
			}
			if m.Type == "nsfs" {
				if inode, ok := parseNSLink(m.Root); ok && found[inode] == "" {
					found[inode] = root + m.Dir
				}
			}
			return true
		})
	}
}

// InodeOf returns the inode of the network namespace of a process. An error
// matches fs.ErrNotExist if the process has ended.
func InodeOf(proc string, pid int) (uint64, error) {
	path := filepath.Join(proc, strconv.Itoa(pid), "ns", "net")
	target, err := os.Readlink(path)
	if err != nil {
		return 0, fmt.Errorf("netns of process %d: %w", pid, err)
	}
	ino, ok := parseNSLink(target)
	if !ok {
		return 0, fmt.Errorf("netns of process %d: unexpected link %q", pid, target)
	}
	return ino, nil
}

func linkInode(path string) (uint64, bool) {
	target, err := os.Readlink(path)
	if err != nil {
		return 0, false
	}
	return parseNSLink(target)
}

// parseNSLink reads the form "net:[4026531840]".
func parseNSLink(s string) (uint64, bool) {
	s, ok := strings.CutPrefix(s, "net:[")
	if !ok {
		return 0, false
	}
	s, ok = strings.CutSuffix(s, "]")
	if !ok {
		return 0, false
	}
	ino, err := strconv.ParseUint(s, 10, 64)
	return ino, err == nil
}
