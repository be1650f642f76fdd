package charge

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

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
