package enter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Tree is one mounted cgroup hierarchy.
type Tree struct {
	Mount      string
	V2         bool
	Controller string // name of a v1 tree in /proc/PID/cgroup; "" for v2
}

// Group is a directory in a tree.
type Group struct {
	Tree
	Dir string
}

// Trees lists the hierarchies in which a container has a group of its own, v2 first. root is where
// the v1 ones are mounted.
func Trees(l cgroup.Layout, root string) []Tree {
	trees := []Tree{{Mount: l.V2, V2: true}}
	seen := map[string]bool{realPath(l.V2): true}
	for _, c := range []struct{ mount, controller string }{
		{l.CPU, "cpu"},
		{l.CPUSet, "cpuset"},
		{filepath.Join(root, "cpuacct"), "cpuacct"},
		{l.IO, "blkio"},
	} {
		if c.mount == "" || seen[realPath(c.mount)] {
			continue // absent, or mounted together with another
		}
		if _, err := os.Stat(filepath.Join(c.mount, "cgroup.procs")); err != nil {
			continue
		}
		seen[realPath(c.mount)] = true
		trees = append(trees, Tree{Mount: c.mount, Controller: c.controller})
	}
	return trees
}

func realPath(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}

// Of returns the directory of a process in this tree; "thread-self" is the calling thread.
func (t Tree) Of(proc, pid string) (string, error) {
	data, err := os.ReadFile(filepath.Join(proc, pid, "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		// The v2 tree has the line 0::path, and "" for its controllers.
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), t.Controller) {
			return filepath.Join(t.Mount, f[2]), nil
		}
	}
	return "", fmt.Errorf("%s/%s/cgroup: no controller %q", proc, pid, t.Controller)
}

// moveThread puts the calling thread alone into a v1 group.
func moveThread(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strconv.Itoa(unix.Gettid()))
	return errors.Join(err, f.Close())
}
