package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// disk makes one, and returns its MAJOR:MINOR.
func disk(t *testing.T) string {
	t.Helper()
	disk := testkit.NewDisk(t, 1<<20)
	var st unix.Stat_t
	must(t, unix.Stat(disk.Path, &st))
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// Throttle caps a cgroup at a disk, and Restore removes the caps.
func TestThrottleInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if cg.IO == "" {
		testkit.Skip(t, "no io or blkio controller")
	}
	device := disk(t)
	j := testkit.Journal(t, journal.Open)
	for _, l := range []Limits{{ReadIOPS: 100, WriteBytes: 1 << 20}, {ReadIOPS: 50, WriteIOPS: 10}} {
		for _, line := range Throttle(cg.IO, cg.IO == cg.V2, device, l) {
			must(t, j.Turn(line, line.Value, journal.Owner{Feature: "test"}))
			testkit.Gives(t, line.Ref().Object, line.Value)(line.Read())
		}
	}
	if out, err := j.Restore(openHere, nil); err != nil || len(out) == 0 {
		t.Errorf("restore: %v, %v", out, err)
	}
	for _, line := range Throttle(cg.IO, cg.IO == cg.V2, device, Limits{}) {
		testkit.Gives(t, line.Ref().Object, "")(line.Read())
	}
}

func TestThrottle(t *testing.T) {
	l := Limits{ReadIOPS: 5, WriteBytes: 7}
	text := func(v2 bool, l Limits) string {
		var b strings.Builder
		for _, line := range Throttle("/cg", v2, "8:0", l) {
			fmt.Fprintf(&b, "%s=%q;", filepath.Base(line.Ref().Object), line.Value)
		}
		return b.String()
	}
	for _, c := range []struct {
		v2   bool
		l    Limits
		want string
	}{
		{true, l, `io.max 8:0="rbps=max wbps=7 riops=5 wiops=max";`},
		{true, Limits{}, `io.max 8:0="";`},
		{false, l, `blkio.throttle.read_iops_device 8:0="5";blkio.throttle.write_iops_device 8:0="";blkio.throttle.read_bps_device 8:0="";blkio.throttle.write_bps_device 8:0="7";`},
	} {
		testkit.Same(t, fmt.Sprintf("v2 %v, %+v", c.v2, c.l), c.want, text(c.v2, c.l))
	}
}

func FuzzLineOf(f *testing.F) {
	f.Add("8:0 100\n254:16 rbps=max wbps=1 riops=max wiops=max\n", "254:16")
	f.Add("", "8:0")
	f.Add("8:0 \n8:0 5", "8:0")
	f.Fuzz(func(t *testing.T, text, device string) {
		if got := lineOf(text, device); strings.ContainsAny(got, "\n") || got != "" && !strings.Contains(text, device+" ") {
			t.Fatalf("%q of %q in %q", got, device, text)
		}
	})
}

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
			testkit.Gives(t, fmt.Sprintf("%s: %s", when, l.Ref().Object), want)(l.Read())
		}
	}
	expect("at first", "100", "100")
	for _, l := range lines {
		must(t, j.Turn(l, l.Value, journal.Owner{Feature: "test"}))
	}
	expect("when set", "5000", "1000")
	open := func(r journal.Ref) (journal.Knob, error) { return Open(DefaultRoot, r) }
	if out, err := j.Restore(open, nil); err != nil || len(out) != len(lines) {
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
		testkit.Same(t, "got", c.want, c.got)
	}
}
