package isolate

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// Beside one busy neighbour of the usual weight, the weight's share of the CPU is at most the
// quota.
func TestSharesFor(t *testing.T) {
	for cpus := 0.001; cpus < 4; cpus += 0.001 {
		share := float64(sharesFor(cpus)) / float64(sharesFor(cpus)+usualShares)
		if want := min(cpus, 1); math.Abs(share-want) > 0.002 {
			t.Errorf("sharesFor(%v) = %d: a share of %.4f, want %.4f", cpus, sharesFor(cpus), share, want)
		}
	}
}

// TestWeightFollowsQuota changes the quota of an isolated container, and its owner changes its
// weight.
func TestWeightFollowsQuota(t *testing.T) {
	dir := t.TempDir()
	set := func(file, value string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(dir, file), []byte(value), 0o600))
	}
	j, err := journal.Open(t.TempDir(), "")
	must(t, err)
	defer j.Close()
	c := container.Container{ID: 7, NetNS: 1, Cgroup: container.Cgroup{CPU: dir}}
	tenants := tenant.New("/proc", tenant.Network)
	of, _, err := tenants.Apply(policy.Target{Container: c})
	must(t, err)
	is := New(Config{Feature: "netcpu", Tenants: tenants, Journal: j, Layout: cgroup.Layout{CPU: filepath.Dir(dir)}, Roots: kernel.Roots{Cgroup: filepath.Dir(dir)}})
	in := &isolation{of: of, payer: c}
	is.isolated[of.Key()] = in
	set("cgroup.procs", "") // present in every cgroup
	set("cpu.cfs_period_us", "100000")
	set("cpu.idle", "0")
	set("cpu.shares", "900") // as wide as the other values, since a plain file is not truncated
	for _, step := range []struct {
		quota, shares string // set by its owner; "" for nothing
		want          string
		before        string // recorded; "" for nothing
	}{
		{"20000", "", "256", "900"},
		{"40000", "", "683", "900"},
		{"10000", "", "114", "900"},
		{"60000", "", "900", ""}, // its owner's weight is less than that
		{"20000", "", "256", "900"},
		{"-1", "", "900", ""},
		{"20000", "", "256", "900"},
		{"", "700", "256", "700"}, // the owner changed the weight that was found
		{"40000", "", "683", "700"},
		{"", "100", "100", ""}, // lower than the quota's weight: left alone
		{"20000", "", "100", ""},
		{"", "800", "256", "800"},
		{"60000", "2048", "1536", "2048"},
		{"100000", "", "2048", ""}, // a weight cannot express it
		{"60000", "", "1536", "2048"},
	} {
		if step.quota != "" {
			set("cpu.cfs_quota_us", step.quota)
		}
		if step.shares != "" {
			set("cpu.shares", step.shares)
		}
		for range 2 {
			must(t, is.heed(in, c))
		}
		got, err := cgroup.Weight(dir)
		before := ""
		for _, e := range j.Entries() {
			before += e.Before
		}
		if err != nil || strconv.FormatUint(got, 10) != step.want || before != step.before {
			t.Errorf("%+v: weight %d, noted %q, %v", step, got, before, err)
		}
	}
	if out, err := j.Restore(func(r journal.Ref) (journal.Knob, error) { return cgroup.Open(dir, r) }, nil); err != nil || len(out) != 1 || out[0].Result != journal.Restored {
		t.Errorf("restore: %+v, %v", out, err)
	}
	if got, err := cgroup.Weight(dir); err != nil || got != 2048 {
		t.Errorf("restored to %d, %v", got, err)
	}
}
