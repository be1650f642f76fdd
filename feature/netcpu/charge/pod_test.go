package charge

import (
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
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
				must(t, is.Weigh(two))
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
