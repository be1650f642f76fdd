package cgroup

import (
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// A cgroup that was made idle gets its own weight back, not the kernel's default.
func TestIdleInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := cpuGroup(t)
	weight := "cpu.shares"
	if cg.CPU == cg.V2 {
		weight = "cpu.weight"
	}
	must(t, File(filepath.Join(cg.CPU, weight)).Write("321"))
	knob, _ := WeightKnob(cg.CPU, cg.CPU == cg.V2)
	j := testkit.Journal(t, journal.Open)
	restore := func(when string) {
		t.Helper()
		out, err := j.Restore(openHere, nil)
		if err != nil || len(out) != 1 || out[0].Result == journal.Foreign {
			t.Fatalf("restore %s: %+v, %v", when, out, err)
		}
		testkit.Gives(t, "weight "+when, uint64(321))(Weight(cg.CPU))
		testkit.Gives(t, "cpu.idle "+when, "0")(File(filepath.Join(cg.CPU, idleFile)).Read())
	}
	turn := func() {
		t.Helper()
		must(t, j.Turn(knob, Idled, journal.Owner{Feature: "test"}))
		testkit.Gives(t, "the weight", uint64(0))(Weight(cg.CPU))
	}
	turn()
	restore("after restore")
	turn()
	// A restore was killed between its two steps.
	must(t, File(filepath.Join(cg.CPU, idleFile)).Write("0"))
	restore("after a restore that was cut short")
}

func TestWeightRefusals(t *testing.T) {
	dir := tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.idle", "0\n", "cpu.shares", "1024\n")
	for _, to := range []string{"", "-1", "idle ", "max"} {
		if knob, _ := WeightKnob(dir, false); knob.Write(to) == nil {
			t.Errorf("%q was written", to)
		}
	}
}
