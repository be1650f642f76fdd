package charge

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/tenant"
)

// One container of a pod is isolated, and another is charged, with a credit beyond its share: one
// of the two has the pod's weight, and keeps it.
func TestWeightInPod(t *testing.T) {
	for _, tt := range []struct {
		name, quota string
		charged     bool // the charged one has the weight
	}{
		{"that needs a weight", "20000", false},
		{"that needs none", "110000", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newChargeRig(t, false, "cpu.cfs_quota_us", tt.quota, "cpu.cfs_period_us", "100000", "cpu.shares", "500")
			one, two := r.pod()
			is := isolate.New(isolate.Config{Feature: "netcpu", Tenants: tenant.New("/proc", tenant.Network), Journal: r.cfg.Journal, Roots: r.cfg.Roots, Layout: r.cfg.Layout})
			must(t, r.Add(one, 0))
			p := r.payers[r.dir]
			r.free = true
			r.rounds(30, 0, 20*ms)
			if p.weighs <= 500 {
				t.Fatalf("a weight of %d for one that is robbed", p.weighs)
			}
			for range 20 {
				_, err := is.Weigh(two)
				must(t, err)
				is := r.read("cpu.shares")
				r.rounds(5, 0, 20*ms)
				// Isolation asks for no more than the quota, charging for more than 500.
				if got := r.read("cpu.shares"); (is > "500") != tt.charged || (got > "500") != tt.charged || !tt.charged && got != is {
					t.Fatalf("a weight of %s, then %s", is, got)
				}
				for _, e := range r.cfg.Journal.Entries() {
					if filepath.Base(e.Ref.Object) == "cpu.shares" && (e.Before != "500" || (e.Owner.Container == uint64(one.ID)) != tt.charged) {
						t.Fatalf("noted: %+v", e)
					}
				}
			}
			_, err := is.Release(t.Context(), nil, two.ID)
			must(t, err)
			r.rounds(30, 0, 20*ms)
			if p.weight != 500 || p.weighs <= 500 {
				t.Errorf("a weight of %d of %d once it is the pod's own again", p.weighs, p.weight)
			}
			must(t, r.Remove(one.ID))
			if got := r.read("cpu.shares"); got != "500" || len(r.cfg.Journal.Entries()) != 0 {
				t.Errorf("a weight of %s in the end, %+v", got, r.cfg.Journal.Entries())
			}
		})
	}
}

// Another feature's claim on a quota or a weight is not taken for the owner's setting: the stricter
// quota is in force, the owner's is charged, and it is restored in the end, in whatever order the
// claims end.
func TestChargeBesideClaims(t *testing.T) {
	other := journal.Owner{Feature: "blockio", Container: uint64(webID)}
	for _, tt := range []struct {
		name, quota string // the owner's
		v2, first   bool   // the other feature claims first, and ends its claim first
	}{
		{"quota", "50000", false, false}, {"quota, first", "50000", false, true},
		{"no quota", "-1", false, false}, {"no quota, first", "-1", false, true},
		{"quota", "50000 100000", true, false}, {"no quota, first", "max 100000", true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := []string{"cpu.cfs_quota_us", tt.quota, "cpu.cfs_period_us", "100000", "cpu.idle", "0"}
			quotaFile, weightFile, weight := "cpu.cfs_quota_us", "cpu.shares", "1024"
			if tt.v2 {
				files = []string{"cpu.max", tt.quota, "cpu.idle", "0"}
				quotaFile, weightFile, weight = "cpu.max", "cpu.weight", "100"
			}
			r := newChargeRig(t, tt.v2, files...)
			r.ran = 40 * ms
			limited := tt.quota[0] != '-' && tt.quota[0] != 'm'
			quota, value := cgroup.Quota(r.dir, tt.v2, 20*ms, 100*ms)
			shares, _ := cgroup.WeightKnob(r.dir, tt.v2)
			claim := func() {
				must(t, r.cfg.Journal.Turn(quota, value, other))
				must(t, r.cfg.Journal.Turn(shares, cgroup.Idled, other))
			}
			letGo := func() {
				_, err := r.cfg.Journal.Restore(kernel.Opener(r.cfg.Roots), func(e journal.Entry) bool { return e.Owner == other })
				must(t, err)
			}
			if tt.first {
				claim()
			}
			must(t, r.Add(r.container(), 0))
			p := r.of[webID]
			r.rounds(20, 10*ms, 0)
			if !tt.first {
				claim()
			}
			r.rounds(40, 10*ms, 0)
			if b := p.limit; b.Limited != limited || limited && b.Quota != 50*ms {
				t.Errorf("what is charged is %+v", b)
			}
			if p.weight != map[bool]uint64{false: 1024, true: 100}[tt.v2] {
				t.Errorf("its weight is taken for %d", p.weight)
			}
			if got := r.quota(); got > 20*ms || got < time.Millisecond {
				t.Errorf("a quota of %v while it yields", got)
			}
			if now, err := shares.Read(); err != nil || now != cgroup.Idled {
				t.Errorf("the weight is %s, %v, while it yields", now, err)
			}
			if tt.first {
				letGo()
				r.rounds(10, 10*ms, 0)
				must(t, r.Remove(webID))
			} else {
				must(t, r.Remove(webID))
				letGo()
			}
			if left := r.cfg.Journal.Entries(); r.read(quotaFile) != tt.quota || r.read(weightFile) != weight || r.read("cpu.idle") != "0" || len(left) != 0 {
				t.Errorf("in the end: quota %s, weight %s, idle %s, %+v", r.read(quotaFile), r.read(weightFile), r.read("cpu.idle"), left)
			}
		})
	}
}

// The weights of all siblings are read only in a round in which packets take others' time.
func TestCalmRoundsReadNoSiblings(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "50000 100000")
	must(t, r.Add(r.container(), 0))
	for i, took := range []time.Duration{0, 0, 100 * ms} {
		r.costs[webID] = cost{Took: took}
		s := newShares(r.Charger)
		must(t, r.step(r.of[webID], r.costs, s, r.now.Add(time.Duration(i)*law.Tick)))
		if read := len(s.sum) > 0; read != (took > 0) {
			t.Errorf("after %v that packets took, weights are read: %t", took, read)
		}
	}
}

func TestScaled(t *testing.T) {
	for _, tt := range []struct {
		weight      uint64
		factor      float64
		least, most uint64
		want        uint64
	}{
		{1024, 1, 2, 262144, 1024},
		{1024, 0.5, 2, 262144, 512},
		{1024, 0.0001, 2, 262144, 2},
		{200000, 4, 2, 262144, 262144},
		{100, 0.333, 1, 10000, 33},
		{1, 0.03, 1, 10000, 1},
	} {
		if got := scaled(tt.weight, tt.factor, tt.least, tt.most); got != tt.want {
			t.Errorf("%d × %v is %d, want %d", tt.weight, tt.factor, got, tt.want)
		}
	}
}
