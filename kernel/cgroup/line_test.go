package cgroup

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
)

// disk makes one, and returns its MAJOR:MINOR.
func disk(t *testing.T) string {
	t.Helper()
	disk, err := loop.New(t.TempDir(), 1<<20)
	must(t, err)
	t.Cleanup(func() { must(t, disk.Close()) })
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
			if got, err := line.Read(); err != nil || got != line.Value {
				t.Errorf("%s reads %q, %v, want %q", line.Ref().Object, got, err, line.Value)
			}
		}
	}
	if out, err := j.Restore(openHere, nil); err != nil || len(out) == 0 {
		t.Errorf("restore: %v, %v", out, err)
	}
	for _, line := range Throttle(cg.IO, cg.IO == cg.V2, device, Limits{}) {
		if got, err := line.Read(); err != nil || got != "" {
			t.Errorf("%s reads %q, %v, after restore", line.Ref().Object, got, err)
		}
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
		if got := text(c.v2, c.l); got != c.want {
			t.Errorf("v2 %v, %+v: %s, want %s", c.v2, c.l, got, c.want)
		}
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
