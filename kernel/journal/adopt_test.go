package journal

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestAdopt(t *testing.T) {
	boot, err := BootID("/proc")
	if err != nil {
		t.Fatal(err)
	}
	b := newBoard("x", "0")
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "state")
	j, err := Open(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Turn(b.knob("x"), "1", Owner{Feature: "test"}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "set.json"), []byte("by hand"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Adopt(from, to, "set.json"); !errors.Is(err, ErrBusy) {
		t.Errorf("while another agent has it: %v", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again there is nothing to do
		if err := Adopt(from, to, "set.json"); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(to, "set.json")); err != nil || string(got) != "by hand" {
			t.Errorf("beside the journal: %q, %v", got, err)
		}
	}
	if left, err := os.ReadDir(from); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}

	// What is there is newer.
	if err := os.WriteFile(filepath.Join(from, prefix+boot), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Adopt(from, to); err != nil {
		t.Fatal(err)
	}
	if j, err = Open(to); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if out, err := j.Restore(b.open, nil); err != nil || len(out) != 1 || b.get("x") != "0" {
		t.Errorf("restored %+v, %v; x is %s", out, err, b.get("x"))
	}
	if err := Adopt(filepath.Join(from, "none"), to); err != nil {
		t.Errorf("nothing to adopt: %v", err)
	}
}
