package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// What a killed agent has changed is undone although its state directory was removed, unless the
// agent lives: its copy is locked.
func TestRestoreAlone(t *testing.T) {
	proc, dir, group := fakeProc(t), t.TempDir(), filepath.Join(t.TempDir(), "fairlead")
	cfg := Config{Roots: kernel.Roots{Proc: proc, Cgroup: filepath.Dir(group)}, StateDir: filepath.Join(dir, "state"), Log: quiet()}
	j, err := openJournal(cfg)
	testkit.Must(t, err)
	testkit.Must(t, j.Turn(cgroup.Group(group), cgroup.Present, journal.Owner{Feature: "netcpu"}))
	testkit.Must(t, os.RemoveAll(cfg.StateDir))
	if out, err := RestoreAlone(cfg, nil); err != nil || len(out) != 0 {
		t.Errorf("beside the agent: %+v, %v", out, err)
	}
	testkit.Must(t, j.Close())
	testkit.Must(t, os.RemoveAll(cfg.StateDir))
	if out, err := RestoreAlone(cfg, nil); err != nil || len(out) != 1 || out[0].Result != journal.Restored {
		t.Errorf("alone: %+v, %v", out, err)
	}
	if _, err := os.Stat(group); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the group is still there: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(proc, "1/root/run/fairlead/%*")); err != nil || len(left) > 0 {
		t.Errorf("copies are left: %q, %v", left, err)
	}
}
