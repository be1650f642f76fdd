// Package cgroup finds the control groups of this host and of its processes, on
// cgroup v2, v1 and hybrid hosts. All writes to their files go through this
// package, and through package journal first.
//
// It does not know containers and keeps no state. Package container uses it to
// read, and the features use it to write.
package cgroup

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/mountinfo"
)

// DefaultRoot is where every distribution mounts its cgroup hierarchies.
const DefaultRoot = "/sys/fs/cgroup"

// The values of [Layout.Mode].
const (
	ModeV2     = "v2"     // one tree with every controller that fairlead needs
	ModeHybrid = "hybrid" // a v2 tree, and at least one of our controllers on v1
	ModeV1     = "v1"     // no v2 tree at all: fairlead cannot identify containers
)

// maxFile bounds how much of one file in proc is read: a process chooses the names of its cgroups.
const maxFile = 1 << 20

var (
	// ErrNone means that no cgroup hierarchy is mounted below the root.
	ErrNone = errors.New("no cgroup hierarchy")
	// ErrOutside means that a process is in a cgroup that is not visible below the root: the
	// cgroup lies above our own cgroup namespace, or has been removed.
	ErrOutside = errors.New("cgroup is not visible from here")
)

// Layout is where the hierarchies of this host are mounted. On a v2 host CPU, CPUSet and IO equal
// V2 where the tree has that controller.
type Layout struct {
	V2     string // the mount directories; "" if absent
	CPU    string
	CPUSet string
	IO     string // blkio on v1
	Mode   string
}

// Paths are the cgroup directories of one process, absolute. A hierarchy that
// is absent from the [Layout] has "".
type Paths struct {
	V2     string
	CPU    string
	CPUSet string
	IO     string
}

// Detect reads the mount table of this process from proc (usually "/proc") and returns the
// hierarchies mounted at or below root ([DefaultRoot] if empty). It ignores mounts of a part of a
// hierarchy. Without any hierarchy it returns an error that matches [ErrNone].
func Detect(proc, root string) (Layout, error) {
	if root == "" {
		root = DefaultRoot
	}
	root = filepath.Clean(root)
	var l Layout
	err := mountinfo.Read(proc, "self", func(m mountinfo.Mount) bool { l.mounted(m, root); return true })
	if err != nil && !errors.Is(err, mountinfo.ErrLong) { // the hierarchies are mounted early
		return Layout{}, fmt.Errorf("detect cgroups: %w", err)
	}

	v1 := l.CPU != "" || l.CPUSet != "" || l.IO != ""
	if l.V2 != "" {
		has, err := controllers(l.V2)
		if err != nil {
			return Layout{}, fmt.Errorf("detect cgroups: %w", err)
		}
		for dir, name := range map[*string]string{&l.CPU: "cpu", &l.CPUSet: "cpuset", &l.IO: "io"} {
			if *dir == "" && slices.Contains(has, name) {
				*dir = l.V2
			}
		}
	}
	switch {
	case l.V2 != "" && v1:
		l.Mode = ModeHybrid
	case l.V2 != "":
		l.Mode = ModeV2
	case v1:
		l.Mode = ModeV1
	default:
		return Layout{}, fmt.Errorf("detect cgroups below %s: %w", root, ErrNone)
	}
	return l, nil
}

// mounted records the mount directory of a hierarchy at or below root. The first of several mounts
// of one hierarchy counts.
func (l *Layout) mounted(m mountinfo.Mount, root string) {
	if m.Root != "/" || !below(m.Dir, root) {
		return
	}
	switch m.Type {
	case "cgroup2":
		l.V2 = cmp.Or(l.V2, m.Dir)
	case "cgroup":
		for opt := range strings.SplitSeq(m.Super, ",") {
			switch opt {
			case "cpu":
				l.CPU = cmp.Or(l.CPU, m.Dir)
			case "cpuset":
				l.CPUSet = cmp.Or(l.CPUSet, m.Dir)
			case "blkio":
				l.IO = cmp.Or(l.IO, m.Dir)
			}
		}
	}
}

// below reports whether the clean path dir is root or lies below it.
func below(dir, root string) bool {
	return dir == root || root == "/" || strings.HasPrefix(dir, root+"/")
}

func controllers(dir string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return nil, err
	}
	return strings.Fields(string(b)), nil
}

// OfPID returns the cgroups of a process, read from proc. An error matches fs.ErrNotExist if the
// process has ended, and [ErrOutside] if its v2 cgroup is not visible.
func (l Layout) OfPID(proc string, pid int) (Paths, error) {
	name := filepath.Join(proc, strconv.Itoa(pid), "cgroup")
	f, err := os.Open(name)
	if err != nil {
		return Paths{}, fmt.Errorf("cgroups of process %d: %w", pid, err)
	}
	defer f.Close()
	p, err := l.parsePID(f)
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist // the process ended between open and read
	}
	if err != nil {
		return Paths{}, fmt.Errorf("cgroups of process %d: %w", pid, err)
	}
	return p, nil
}

// parsePID parses the form of /proc/PID/cgroup: lines of hierarchy-id:controllers:path, where the
// v2 tree is "0::path".
func (l Layout) parsePID(r io.Reader) (Paths, error) {
	var p Paths
	v2 := false
	sc := bufio.NewScanner(io.LimitReader(r, maxFile))
	sc.Buffer(make([]byte, 0, 4096), 64<<10)
	for sc.Scan() {
		id, rest, ok := strings.Cut(sc.Text(), ":")
		ctrl, path, ok2 := strings.Cut(rest, ":")
		if !ok || !ok2 {
			continue
		}
		if id == "0" && ctrl == "" {
			v2 = true
			p.V2 = join(l.V2, path)
			// A controller of the v2 tree is in no other hierarchy.
			for _, c := range []struct{ mount, dst *string }{{&l.CPU, &p.CPU}, {&l.CPUSet, &p.CPUSet}, {&l.IO, &p.IO}} {
				if *c.mount != "" && *c.mount == l.V2 {
					*c.dst = p.V2
				}
			}
			continue
		}
		for c := range strings.SplitSeq(ctrl, ",") {
			switch {
			case c == "cpu" && l.CPU != l.V2:
				p.CPU = join(l.CPU, path)
			case c == "cpuset" && l.CPUSet != l.V2:
				p.CPUSet = join(l.CPUSet, path)
			case c == "blkio" && l.IO != l.V2:
				p.IO = join(l.IO, path)
			}
		}
	}
	if err := sc.Err(); err != nil {
		return Paths{}, err
	}
	if l.V2 != "" && (!v2 || p.V2 == "") {
		return Paths{}, ErrOutside
	}
	return p, nil
}

// join appends the path that proc shows to the mount directory. It returns "" for an absent
// hierarchy, and for a path that is not visible from here: one above our cgroup namespace
// ("/../x"), or one of a removed cgroup.
func join(mount, path string) string {
	if mount == "" || !strings.HasPrefix(path, "/") || strings.HasSuffix(path, " (deleted)") {
		return ""
	}
	if slices.Contains(strings.Split(path, "/"), "..") {
		return ""
	}
	return filepath.Join(mount, path)
}

// ID returns the inode number of a cgroup directory. In the v2 tree that is
// the cgroup's id as BPF programs see it.
func ID(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat cgroup", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return 0, &fs.PathError{Op: "stat cgroup", Path: path, Err: unix.ENOTDIR}
	}
	return st.Ino, nil
}
