package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestUngrouped(t *testing.T) {
	for was, during := range map[string]string{"1\n": "0\n", "0\n": "0\n"} {
		path := filepath.Join(t.TempDir(), "enabled")
		testkit.Must(t, os.WriteFile(path, []byte(was), 0o644))
		restore, err := ungrouped(path)
		testkit.Must(t, err)
		if is, _ := os.ReadFile(path); string(is) != during {
			t.Errorf("%q became %q, want %q", was, is, during)
		}
		testkit.Check(t, restore())
		if is, _ := os.ReadFile(path); string(is) != was {
			t.Errorf("%q was restored to %q", was, is)
		}
	}
	restore, err := ungrouped(filepath.Join(t.TempDir(), "none"))
	if err != nil {
		t.Fatalf("where the kernel has no such groups: %v", err)
	}
	testkit.Check(t, restore())
}
