package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Group makes a cgroup and removes it again, but not while a process is in it.
func TestGroupInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := cpuGroup(t)
	j := testkit.Journal(t, journal.Open)
	k := Group(filepath.Join(cg.CPU, "fairlead"))
	expect := func(want string) {
		t.Helper()
		if got, err := k.Read(); err != nil || got != want {
			t.Fatalf("it is %q, %v; want %q", got, err, want)
		}
	}
	expect(Absent)
	must(t, j.Turn(k, Present, journal.Owner{Feature: "test"}))
	expect(Present)
	testkit.Is(t, "what was made is no cgroup", testkit.Err(os.Stat(filepath.Join(k.Ref().Object, "cgroup.procs"))), nil)

	sleeper := testkit.CG{CPU: k.Ref().Object}.Sleeper(t)
	testkit.Is(t, "removed with a process in it", k.Write(Absent), unix.EBUSY)
	expect(Present)
	testkit.CG{CPU: cg.CPU}.Add(t, sleeper.Pid)

	if _, err := j.Restore(openHere, nil); err != nil || len(j.Entries()) != 0 {
		t.Errorf("restore: %v, %+v", err, j.Entries())
	}
	expect(Absent)
}
