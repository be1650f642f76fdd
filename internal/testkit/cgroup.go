package testkit

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// CG is a scratch cgroup of a test: one directory in the v2 tree and one in the hierarchies of the
// cpu and the io controller. These are the same directory on a pure v2 host, and different ones on
// a hybrid or v1 host.
type CG struct {
	V2  string // absolute; "" on a host without a v2 tree
	CPU string // absolute; "" on a host without the cpu controller
	IO  string // the same for io (v2) or blkio (v1)
}

// Cgroup creates a scratch cgroup below the roots of the host's hierarchies. It needs root, and
// skips t otherwise. When t ends, Cgroup kills every process in the cgroup, and removes it with all
// cgroups below it.
func Cgroup(t testing.TB) CG {
	t.Helper()
	NeedRoot(t)
	data, err := os.ReadFile("/proc/self/mountinfo")
	Must(t, err)
	root := cgroupMounts(data)
	for dir, controller := range map[*string]string{&root.CPU: "cpu", &root.IO: "io"} {
		if *dir != "" || root.V2 == "" {
			continue
		}
		// Pure v2: enable the controller for children, as systemd does.
		err := os.WriteFile(filepath.Join(root.V2, "cgroup.subtree_control"), []byte("+"+controller), 0)
		if err == nil {
			*dir = root.V2
		}
	}
	name := fmt.Sprintf("fairlead-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	cg := root.below(name)
	for _, dir := range cg.dirs() {
		t.Cleanup(func() { Must(t, removeCgroup(dir)) })
		Must(t, os.Mkdir(dir, 0o755))
	}
	return cg
}

// Add moves a process, with all its threads, into the cgroup.
func (c CG) Add(t testing.TB, pid int) {
	t.Helper()
	for _, dir := range c.dirs() {
		err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if err != nil {
			t.Fatalf("move process %d to %s: %v", pid, dir, err)
		}
	}
}

// Sleeper runs a process that sleeps in the cgroup until t ends.
func (c CG) Sleeper(t testing.TB) *os.Process {
	t.Helper()
	return c.start(t, "sleep", "inf")
}

// Spinner runs a process that computes in the cgroup until t ends.
func (c CG) Spinner(t testing.TB) *os.Process {
	t.Helper()
	return c.start(t, "sh", "-c", "while :; do :; done")
}

func (c CG) start(t testing.TB, name string, args ...string) *os.Process {
	t.Helper()
	cmd := exec.Command(name, args...)
	Must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Process.Wait() })
	c.Add(t, cmd.Process.Pid)
	return cmd.Process
}

// Child creates a cgroup below c in each of its hierarchies. It is removed with c.
func (c CG) Child(t testing.TB, name string) CG {
	t.Helper()
	child := c.below(name)
	for _, dir := range child.dirs() {
		Must(t, os.Mkdir(dir, 0o755))
	}
	return child
}

// below returns c with the paths of its cgroups with this name.
func (c CG) below(name string) CG {
	for _, dir := range []*string{&c.V2, &c.CPU, &c.IO} {
		if *dir != "" {
			*dir = filepath.Join(*dir, name)
		}
	}
	return c
}

// dirs lists the directories of c, each once.
func (c CG) dirs() []string {
	dirs := []string{c.V2, c.CPU, c.IO}
	slices.Sort(dirs)
	return slices.DeleteFunc(slices.Compact(dirs), func(dir string) bool { return dir == "" })
}

// cgroupMounts finds where the v2 tree and the v1 cpu and blkio hierarchies are mounted, in the
// text of a mountinfo file (proc_pid_mountinfo(5)). The first mount of each wins.
func cgroupMounts(mountinfo []byte) CG {
	var cg CG
	for s := bufio.NewScanner(bytes.NewReader(mountinfo)); s.Scan(); {
		before, after, ok := strings.Cut(s.Text(), " - ")
		head, tail := strings.Fields(before), strings.Fields(after)
		if !ok || len(head) < 5 || len(tail) < 3 {
			continue
		}
		switch dir := head[4]; {
		case tail[0] == "cgroup2" && cg.V2 == "":
			cg.V2 = dir
		case tail[0] == "cgroup" && cg.CPU == "" && strings.Contains(","+tail[2]+",", ",cpu,"):
			cg.CPU = dir
		case tail[0] == "cgroup" && cg.IO == "" && strings.Contains(","+tail[2]+",", ",blkio,"):
			cg.IO = dir
		}
	}
	return cg
}

// removeCgroup kills the processes in dir and below, and removes the directories, children first. A
// missing directory is a success.
func removeCgroup(dir string) error {
	dirs, err := cgroupsIn(dir)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := emptyAndRemove(dir); err != nil {
			return err
		}
	}
	return nil
}

// cgroupsIn lists dir and the cgroups below it, children first; none if dir is missing.
func cgroupsIn(dir string) (dirs []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list cgroup %s: %w", dir, err)
	}
	slices.Reverse(dirs)
	return dirs, nil
}

// processesIn lists the processes in a cgroup, not below it.
func processesIn(dir string) []string {
	data, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // a missing cgroup has none
	return strings.Fields(string(data))
}

// emptyAndRemove repeats kill and rmdir: a killed process keeps its cgroup busy until it is reaped,
// and a kernel thread until its device has gone.
func emptyAndRemove(dir string) error {
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		err = os.Remove(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		for _, f := range processesIn(dir) {
			pid, err := strconv.Atoi(f)
			if err != nil || pid <= 0 || pid == os.Getpid() {
				continue
			}
			unix.Kill(pid, unix.SIGKILL) // ESRCH: it has just ended
		}
	}
	return fmt.Errorf("remove cgroup: %w", err)
}
