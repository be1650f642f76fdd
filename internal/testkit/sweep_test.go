package testkit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSweep expects the leftovers of a killed run to be removed: its processes and its nested
// cgroups. A cgroup with any other process in it stays.
func TestSweep(t *testing.T) {
	cg := Cgroup(t)
	left, inside, busy := cg.Child(t, "left-1"), cg.Child(t, "left-1/inside"), cg.Child(t, "left-2")
	begin := func(in CG, env ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command("sleep", "1000")
		cmd.Env = append(os.Environ(), env...)
		Must(t, cmd.Start())
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		in.Add(t, cmd.Process.Pid)
		return cmd
	}
	begin(inside, "SWEPT=7")
	other := begin(busy, "KEPT=7")

	removed := sweep("SWEPT=", cg.CPU, "left-*")
	for dir, want := range map[string]error{left.CPU: fs.ErrNotExist, busy.CPU: nil} {
		if _, err := os.Stat(dir); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", dir, err, want)
		}
	}
	Must(t, other.Process.Signal(unix.SIGTERM))
	if err := other.Wait(); err == nil || err.Error() != "signal: terminated" {
		t.Errorf("the process without the mark ended by %v, want by the test's signal", err)
	}
	if len(removed) != 3 || !strings.HasPrefix(removed[0], "process ") || !slices.Contains(removed, "cgroup "+filepath.Join(cg.CPU, "left-1")) {
		t.Errorf("removed: %q", removed)
	}
}

// TestSweepNames expects the names of namespaces to be removed whose process has ended, and no other.
func TestSweepNames(t *testing.T) {
	ended := exec.Command("true")
	Must(t, ended.Run())
	gone := fmt.Sprintf("flt-%d-1", ended.Process.Pid)
	dir := Tree(t, map[string]string{gone: "", fmt.Sprintf("flt-%d-1", os.Getpid()): "", "flt-x-1": "", "mine": ""})
	Same(t, "removed", []string{"netns " + filepath.Join(dir, gone)}, sweepNames(dir))
	if left, err := os.ReadDir(dir); err != nil || len(left) != 3 {
		t.Errorf("left: %v, %v", left, err)
	}
}
