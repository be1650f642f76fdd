package cgroup

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestReadBandwidth(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name  string
		files []string
		want  Bandwidth
		bad   bool
	}{
		{"v2", []string{"cpu.max", "50000 100000\n", "cpu.max.burst", "5000\n"}, Bandwidth{50 * ms, true, 100 * ms, 5 * ms}, false},
		{"v2 max", []string{"cpu.max", "max 100000\n"}, Bandwidth{Period: 100 * ms}, false},
		{"v1", []string{"cpu.cfs_quota_us", "150000\n", "cpu.cfs_period_us", "50000\n", "cpu.cfs_burst_us", "0\n"}, Bandwidth{150 * ms, true, 50 * ms, 0}, false},
		{"v1 without a burst", []string{"cpu.cfs_quota_us", "1000\n", "cpu.cfs_period_us", "100000\n"}, Bandwidth{ms, true, 100 * ms, 0}, false},
		{"v1 none", []string{"cpu.cfs_quota_us", "-1\n", "cpu.cfs_period_us", "100000\n"}, Bandwidth{Period: 100 * ms}, false},
		{"negative", []string{"cpu.max", "-5 100000\n"}, Bandwidth{}, true},
		{"absurd", []string{"cpu.max", "99999999999999999 100000\n"}, Bandwidth{}, true},
		{"nothing", []string{"cpu.max", "0 100000\n"}, Bandwidth{}, true},
		{"no period", []string{"cpu.max", "5\n"}, Bandwidth{}, true},
		{"period 0", []string{"cpu.max", "max 0\n"}, Bandwidth{}, true},
		{"empty", []string{"cpu.max", ""}, Bandwidth{}, true},
		{"bad burst", []string{"cpu.max", "50000 100000\n", "cpu.max.burst", "-1\n"}, Bandwidth{}, true},
		{"v1 without a period", []string{"cpu.cfs_quota_us", "1000\n"}, Bandwidth{}, true},
	} {
		dir := tree(t, filepath.Join(t.TempDir(), "cg"), c.files...)
		got, err := ReadBandwidth(dir)
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
		if cpus, limited, err := CPUQuota(dir); !c.bad && (limited != got.Limited || cpus != float64(c.want.Quota)/float64(c.want.Period) || err != nil) {
			t.Errorf("%s: a quota of %v, %v, %v", c.name, cpus, limited, err)
		}
	}
	without := tree(t, filepath.Join(t.TempDir(), "cg"))
	testkit.Is(t, "no controller", testkit.Err(ReadBandwidth(without)), errors.ErrUnsupported)
	if _, limited, err := CPUQuota(without); limited || err != nil {
		t.Errorf("the root of v2 has a quota: %v, %v", limited, err)
	}
	if cpus, _, err := CPUQuota(tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.max", "-5 100000\n")); err == nil {
		t.Errorf("a negative quota is %v CPUs", cpus)
	}
	testkit.Is(t, "gone", testkit.Err(ReadBandwidth(filepath.Join(t.TempDir(), "gone"))), journal.ErrGone)
}

func TestReadPeriods(t *testing.T) {
	for _, c := range []struct {
		stat string
		want Periods
		bad  bool
	}{
		{"usage_usec 1500\nnr_periods 7\nnr_throttled 3\nthrottled_usec 9\n", Periods{7, 3}, false},
		{"nr_periods 7\nnr_throttled 3\nthrottled_time 9\n", Periods{7, 3}, false},
		{"usage_usec 1500\n", Periods{}, true},
		{"", Periods{}, true},
		{"nr_periods -1\nnr_throttled 1\n", Periods{}, true},
	} {
		p, err := ReadPeriods(tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.stat", c.stat))
		if p != c.want || (err != nil) != c.bad {
			t.Errorf("%q: %+v, %v", c.stat, p, err)
		}
	}
	testkit.Is(t, "gone", testkit.Err(ReadPeriods(filepath.Join(t.TempDir(), "gone"))), journal.ErrGone)
}

// TestQuotaInKernel writes a quota and reads everything back.
func TestQuotaInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := cpuGroup(t)
	before, err := ReadBandwidth(cg.CPU)
	if err != nil || before.Limited || before.Period != 100*time.Millisecond {
		t.Fatalf("%+v, %v", before, err)
	}
	k, value := Quota(cg.CPU, cg.CPU == cg.V2, 12345678*time.Nanosecond, before.Period)
	must(t, k.Write(value))
	want := Bandwidth{Quota: 12346 * time.Microsecond, Limited: true, Period: before.Period}
	testkit.Gives(t, "ReadBandwidth", want)(ReadBandwidth(cg.CPU))
	testkit.Gives(t, "reads back as", value)(k.Read())
	testkit.Check(t, testkit.Err(ReadPeriods(cg.CPU)))
	child := cg.Child(t, "child")
	must(t, os.Remove(child.CPU))
	testkit.Is(t, "gone", testkit.Err(ReadPeriods(child.CPU)), journal.ErrGone)
}

func FuzzParseBandwidth(f *testing.F) {
	testkit.Seeds(f, "", "max 100000", "-1 100000", "50000 100000", "1 0", "1 2 3", "9223372036854775807 1")
	f.Fuzz(func(t *testing.T, s string) {
		b, err := parseBandwidth(s)
		if err == nil && (b.Period <= 0 || b.Limited != (b.Quota > 0)) || err != nil && b != (Bandwidth{}) {
			t.Fatalf("%q: %+v, %v", s, b, err)
		}
	})
}

func TestChildren(t *testing.T) {
	root := tree(t, filepath.Join(t.TempDir(), "cg"))
	tree(t, filepath.Join(root, "a", "below"))
	tree(t, filepath.Join(root, "b"))
	testkit.Gives(t, "children", []string{filepath.Join(root, "a"), filepath.Join(root, "b")})(Children(root, math.MaxInt))
	testkit.Is(t, "gone", testkit.Err(Children(filepath.Join(root, "gone"), math.MaxInt)), journal.ErrGone)
}
