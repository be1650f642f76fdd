package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/enter"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"golang.org/x/sys/unix"
)

// below returns the directories of one group in all hierarchies.
func (h *Host) below(path string) []enter.Group {
	gs := make([]enter.Group, len(h.trees))
	for i, t := range h.trees {
		gs[i] = enter.Group{Tree: t, Dir: filepath.Join(t.Mount, path)}
	}
	return gs
}

// createGroups creates the directories, with the parent of a [Spec], and sets the CPU limits of the
// sandbox. made is the number of created directories.
func createGroups(gs []enter.Group, cpu CPU) (made int, err error) {
	for i, g := range gs {
		if parent := filepath.Dir(g.Dir); parent != g.Mount {
			if err := createGroup(g.Tree, parent); err != nil && !errors.Is(err, fs.ErrExist) {
				return i, err
			}
		}
		if err := createGroup(g.Tree, g.Dir); err != nil {
			return i, err
		}
		if err := limit(g, cpu); err != nil {
			return i + 1, err
		}
	}
	return len(gs), nil
}

// createGroup creates a directory that can hold processes, with its controllers.
func createGroup(t enter.Tree, dir string) error {
	above := filepath.Dir(dir)
	if t.V2 {
		// A tree without controllers (hybrid hosts) has nothing to enable. Controllers stay enabled,
		// because others may come to rely on them.
		if err := enable(above, "cpu", "cpuset", "io"); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil || t.Controller != "cpuset" {
		return err
	}
	// A new v1 cpuset is empty, and takes no process until it has CPUs and memory nodes.
	for _, name := range []string{"cpuset.mems", "cpuset.cpus"} {
		val, err := os.ReadFile(filepath.Join(above, name))
		if err != nil {
			return err
		}
		if err := write(dir, name, strings.TrimSpace(string(val))); err != nil {
			return err
		}
	}
	return nil
}

func enable(dir string, want ...string) error {
	has, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	on, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	for _, c := range want {
		if slices.Contains(strings.Fields(string(has)), c) && !slices.Contains(strings.Fields(string(on)), c) {
			if err := write(dir, "cgroup.subtree_control", "+"+c); err != nil {
				return err
			}
		}
	}
	return nil
}

func limit(g enter.Group, cpu CPU) error {
	period := cmp.Or(cpu.Period, 100*time.Millisecond)
	has := func(c string) bool {
		if !g.V2 {
			return g.Controller == c
		}
		_, err := os.Stat(filepath.Join(g.Dir, map[string]string{"cpu": "cpu.max", "cpuset": "cpuset.cpus"}[c]))
		return err == nil
	}
	type file struct{ name, value string }
	var files []file
	if has("cpu") {
		q, p := strconv.FormatInt(cpu.Quota.Microseconds(), 10), strconv.FormatInt(period.Microseconds(), 10)
		switch {
		case cpu.Quota < 0 && g.V2:
			files = append(files, file{"cpu.max", "max " + p})
		case cpu.Quota < 0:
			files = append(files, file{"cpu.cfs_quota_us", "-1"})
		case cpu.Quota > 0 && g.V2:
			files = append(files, file{"cpu.max", q + " " + p})
		case cpu.Quota > 0:
			files = append(files, file{"cpu.cfs_period_us", p}, file{"cpu.cfs_quota_us", q})
		}
		switch {
		case cpu.Shares > 0 && g.V2:
			files = append(files, file{"cpu.weight", strconv.FormatUint(weight(cpu.Shares), 10)})
		case cpu.Shares > 0:
			files = append(files, file{"cpu.shares", strconv.FormatUint(cpu.Shares, 10)})
		}
	}
	if cpu.Set != "" && has("cpuset") {
		files = append(files, file{"cpuset.cpus", cpu.Set})
	}
	for _, f := range files {
		if err := write(g.Dir, f.name, f.value); err != nil {
			return err
		}
	}
	return nil
}

// weight converts v1 shares to a v2 weight as OCI runtimes do: [2, 262144] to [1, 10000].
func weight(shares uint64) uint64 {
	shares = min(max(shares, 2), 262144)
	return 1 + (shares-2)*9999/262142
}

func write(dir, name, value string) error {
	return cgroup.File(filepath.Join(dir, name)).Write(value)
}

// removeGroups waits killWait for killed processes, and threadWait for kernel threads of devices that
// are going away: the kernel removes a namespace in the background, which takes time on a busy
// machine.
const (
	killWait   = 30 * time.Second
	threadWait = 5 * time.Second
)

// removeGroups kills all processes in the directories and removes these, children first, and then a
// parent that is empty. It ignores missing directories.
func removeGroups(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, removeGroup(dir))
		if parent := filepath.Dir(dir); strings.HasPrefix(filepath.Base(parent), Prefix) {
			os.Remove(parent) // fails while it has other sandboxes
		}
	}
	return errors.Join(errs...)
}

func removeGroup(dir string) error {
	var tree []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case d.IsDir():
			tree = append(tree, path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var moved []string
	for _, d := range slices.Backward(tree) {
		left, err := empty(d)
		moved = append(moved, left...)
		if err != nil {
			return err
		}
		if err := rmdir(d); err != nil {
			return err
		}
	}
	if len(moved) > 0 {
		return fmt.Errorf("cgroup %s: kernel threads were left in it: %s", dir, strings.Join(moved, ", "))
	}
	return nil
}

// empty kills the processes of a group until there are none. Kernel threads cannot be killed, so it
// moves those that do not leave to the root of the hierarchy, and returns their names.
func empty(dir string) (moved []string, err error) {
	start := time.Now()
	top, _, _ := strings.Cut(dir, "/"+Prefix)
	for {
		pids, err := cgroup.Procs(dir, math.MaxInt)
		if errors.Is(err, journal.ErrGone) {
			err = nil
		}
		if err != nil || len(pids) == 0 {
			return moved, err
		}
		var threads []int
		for _, pid := range pids {
			if kthread(pid) {
				threads = append(threads, pid)
			} else {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
		waited := time.Since(start)
		if len(threads) > 0 && waited > threadWait {
			for _, pid := range threads {
				comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
				if write(top, "cgroup.procs", strconv.Itoa(pid)) == nil {
					moved = append(moved, strings.TrimSpace(string(comm)))
				}
			}
		}
		if waited > killWait {
			return moved, fmt.Errorf("cgroup %s: processes %v do not end", dir, pids)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// kthread reports whether a process is a kernel thread.
func kthread(pid int) bool {
	_, err := sched.Find("/proc", pid)
	return err == nil
}

// rmdir removes an empty group. A process that has just ended may keep it busy for a moment.
func rmdir(dir string) error {
	start := time.Now()
	for {
		err := unix.Rmdir(dir)
		switch {
		case err == nil || err == unix.ENOENT:
			return nil
		case err != unix.EBUSY || time.Since(start) > killWait:
			return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
		}
		time.Sleep(2 * time.Millisecond)
	}
}
