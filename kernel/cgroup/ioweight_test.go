package cgroup

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// IOWeight sets a cgroup's weight at disks in every file that exists. Restore brings back the
// default weight.
func TestIOWeightInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if cg.IO == "" {
		testkit.Skip(t, "no io or blkio controller")
	}
	v2 := cg.IO == cg.V2
	lines := IOWeight(cg.IO, v2, 5000)
	if len(lines) == 0 {
		t.Fatal("this kernel has neither BFQ nor iocost")
	}
	j := testkit.Journal(t, journal.Open)
	expect := func(when string, iocost, bfq string) {
		t.Helper()
		for _, l := range lines {
			want := bfq
			if strings.Contains(l.Ref().Object, "io.weight ") {
				want = iocost
			}
			if got, err := l.Read(); err != nil || got != want {
				t.Errorf("%s: %s reads %q, %v, want %s", when, l.Ref().Object, got, err, want)
			}
		}
	}
	expect("at first", "100", "100")
	for _, l := range lines {
		must(t, j.Turn(l, l.Value, journal.Owner{Feature: "test"}))
	}
	expect("when set", "5000", "1000")
	if out, err := j.Restore(openHere, nil); err != nil || len(out) != len(lines) {
		t.Errorf("restore: %v, %v", out, err)
	}
	expect("after restore", "100", "100")
}

// iocost shares a disk once an administrator has enabled it there, on cgroup v2.
func TestCostEnabledInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	root := filepath.Dir(cg.V2)
	qos := File(filepath.Join(root, "io.cost.qos"))
	if _, err := qos.Read(); cg.V2 == "" || cg.IO != cg.V2 || errors.Is(err, journal.ErrGone) {
		testkit.Skip(t, "no cgroup v2 tree with iocost")
	}
	device := disk(t)
	if CostEnabled(root, device) {
		t.Error("enabled at first")
	}
	for _, on := range []bool{true, false} {
		text := " enable=0"
		if on {
			text = " enable=1"
		}
		must(t, qos.Write(device+text))
		if CostEnabled(root, device) != on {
			t.Errorf("after%s: enabled is %v", text, !on)
		}
	}
}

func TestIOWeight(t *testing.T) {
	v1 := tree(t, filepath.Join(t.TempDir(), "v1"), "blkio.bfq.weight", "100\n")
	both := tree(t, filepath.Join(t.TempDir(), "v2"), "io.weight", "default 100\n", "io.bfq.weight", "default 100\n8:0 5\n")
	one := tree(t, filepath.Join(t.TempDir(), "v2"), "io.weight", "default 100\n8:0 50\n")
	text := func(dir string, v2 bool, n uint32) (out string) {
		for _, l := range IOWeight(dir, v2, n) {
			now, err := l.Read()
			testkit.Check(t, err)
			out += strings.TrimPrefix(l.Ref().Object, dir+"/") + " " + now + ">" + l.Value + ";"
		}
		return out
	}
	for _, c := range []struct{ got, want string }{
		{text(v1, false, 10000), "blkio.bfq.weight 100>1000;"},
		{text(both, true, 2000), "io.weight default 100>2000;io.bfq.weight default 100>1000;"},
		{text(one, true, 1), "io.weight default 100>1;"},
		{text(one, false, 1), ""},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
