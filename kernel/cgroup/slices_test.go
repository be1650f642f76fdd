package cgroup

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The threads of a cgroup get short slices, except one that has requested its own, and Restore
// gives back their former slices. A later thread gets a short slice too.
func TestSlicesInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	usual, err := ownSlice()
	if cg.V2 == "" || errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "no cgroup v2 tree, or no slices of threads (Linux 6.12)")
	}
	must := func(err error) {
		t.Helper()
		must(t, err)
	}
	must(err)
	start := func() int { return testkit.CG{V2: cg.V2}.Sleeper(t).Pid }
	slice := func(pid int) uint64 {
		a, err := unix.SchedGetAttr(pid, 0)
		must(err)
		return a.Runtime
	}
	j, k := testkit.Journal(t, journal.Open), Slices(cg.V2)
	testkit.Is(t, "of no thread", j.Turn(k, ShortSlices, journal.Owner{Feature: "test"}), journal.ErrGone)
	one, two := start(), start()
	const asked = 5_000_000
	must(unix.SchedSetAttr(two, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Nice: 3, Runtime: asked}, 0))
	must(unix.Setpriority(unix.PRIO_PROCESS, one, 7))
	must(j.Turn(k, ShortSlices, journal.Owner{Feature: "test"}))
	three := start()
	must(Shorten(cg.V2))
	if a, b, c := slice(one), slice(two), slice(three); a != uint64(shortSlice) || b != asked || c != a {
		t.Errorf("slices %d, %d, %d", a, b, c)
	}
	out, err := j.Restore(openHere, nil)
	if err != nil || len(out) != 1 || out[0].Result != journal.Restored {
		t.Fatalf("%+v, %v", out, err)
	}
	if a, b, c := slice(one), slice(two), slice(three); a != usual || b != asked || c != usual {
		t.Errorf("slices put back: %d, %d, %d, want %d", a, b, c, usual)
	}
	if attr, err := unix.SchedGetAttr(one, 0); err != nil || attr.Nice != 7 {
		t.Errorf("its nice value is %+v, %v", attr, err)
	}
}
