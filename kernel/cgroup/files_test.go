package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Kept files show what the kernel counts now, of the cgroup that has the name now.
func TestFiles(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	var f Files
	defer f.Keep(nil)
	quota := func(want float64) {
		t.Helper()
		for _, files := range []*Files{&f, nil} {
			if cpus, limited, err := files.CPUQuota(cg.CPU); cpus != want || limited != (want > 0) || err != nil {
				t.Errorf("files kept: %v; quota of %v CPUs, %v, %v, want %v", files != nil, cpus, limited, err, want)
			}
		}
	}
	quota(0)
	knob, value := Quota(cg.CPU, cg.CPU == cg.V2, 5e7, 1e8)
	testkit.Must(t, knob.Write(value))
	kept := len(f.open)
	quota(0.5)
	if kept == 0 || len(f.open) != kept {
		t.Errorf("%d files are open, before %d", len(f.open), kept)
	}
	testkit.Must(t, os.Remove(cg.CPU))
	if _, _, err := f.CPUQuota(cg.CPU); !errors.Is(err, journal.ErrGone) {
		t.Errorf("the cgroup has gone: %v", err)
	}
	testkit.Must(t, os.Mkdir(cg.CPU, 0o755))
	quota(0)
	testkit.Must(t, os.Remove(cg.CPU))
	testkit.Must(t, os.Mkdir(cg.CPU, 0o755))
	quota(0) // the kept files are of the one before
	f.Keep(map[string]bool{cg.CPU: true})
	if len(f.open) != kept {
		t.Errorf("%d files are open of a directory to keep, want %d", len(f.open), kept)
	}
	f.Keep(nil)
	if len(f.open) != 0 {
		t.Errorf("%d files are open of no directory", len(f.open))
	}
}

// A host with many containers does not use up the agent's descriptors.
func TestFilesBound(t *testing.T) {
	var f Files
	defer f.Keep(nil)
	root := t.TempDir()
	for i := range maxKept + 10 {
		dir := tree(t, filepath.Join(root, fmt.Sprint(i)), "cpu.stat", fmt.Sprintf("usage_usec %d\n", i))
		for range 2 {
			if d, err := f.Usage(dir); err != nil || d.Microseconds() != int64(i) {
				t.Fatalf("directory %d: %v, %v", i, d, err)
			}
		}
	}
	if len(f.open) != maxKept {
		t.Errorf("%d files are open, want %d", len(f.open), maxKept)
	}
}
