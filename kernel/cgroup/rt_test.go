package cgroup

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// A budget can be taken back while a task of the group is real-time. The task is ordinary
// afterwards.
func TestRTInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if _, err := RT(cg.CPU).Read(); cg.CPU == "" || errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "no real-time groups of cgroup v1")
	}
	j := testkit.Journal(t, journal.Open)
	must(t, j.Turn(RT(cg.CPU), "100000", journal.Owner{Feature: "test"}))
	pid := testkit.CG{CPU: cg.CPU}.Sleeper(t).Pid
	must(t, unix.Setpriority(unix.PRIO_PROCESS, pid, 5))
	must(t, unix.SchedSetAttr(pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}, 0))
	testkit.Is(t, "the budget of a real-time task", File(filepath.Join(cg.CPU, rtFile)).Write("0"), unix.EBUSY)
	out, err := j.Restore(openHere, nil)
	if err != nil || len(out) != 1 || out[0].Result != journal.Restored {
		t.Fatalf("%+v, %v", out, err)
	}
	testkit.Gives(t, "the budget", "0")(RT(cg.CPU).Read())
	attr, err := unix.SchedGetAttr(pid, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL || attr.Nice != 5 {
		t.Errorf("the task is %+v, %v", attr, err)
	}
}

func TestRTRefusals(t *testing.T) {
	dir := tree(t, filepath.Join(t.TempDir(), "cg"), rtFile, "0\n", "tasks", "")
	for _, to := range []string{"", "-1", "max", "4294967296"} {
		testkit.Fails(t, to, RT(dir).Write(to))
	}
}
