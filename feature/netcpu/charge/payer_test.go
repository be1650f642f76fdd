package charge

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// A quota is written when a period begins, which is searched for with the first write, and at any time
// if the container sleeps.
func TestChargeSeeksPeriods(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		p := r.of[webID]
		looks := func(want bool, quota time.Duration) {
			t.Helper()
			next, err := r.write()
			must(t, err)
			if got := r.quota(); !next.IsZero() != want || got != quota {
				t.Errorf("quota of %v, want %v; the next look is at %v", got, quota, next)
			}
		}
		looks(false, 50*ms)
		p.want = 40 * ms
		looks(true, 50*ms)
		p.pace.began = p.pace.began.Add(-time.Minute)
		looks(false, 40*ms)
		p.want = 30 * ms
		looks(true, 40*ms)
		p.pace.began = p.pace.began.Add(-time.Minute)
		p.want = 40 * ms
		looks(false, 40*ms)
		p.want = 30 * ms
		looks(true, 40*ms)
		p.pace.start = time.Now()
		looks(true, 40*ms)
		looks(true, 40*ms)
		p.due = time.Now()
		looks(false, 30*ms)
	})
}

// The kernel's wait time reaches the ledger; a kernel that does not count it is no error.
func TestChargeWaits(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.free = true
		p := r.of[webID]
		var waited time.Duration
		// rounds in which it uses four fifths of its quota, and a fifth of that is stolen
		rounds := func(n int, told bool) time.Duration {
			for range n {
				r.used -= 2 * p.now / 5
				if waited += 40 * ms; told {
					r.file(filepath.Join(r.cfg.Layout.V2, "web"), "cpu.pressure",
						fmt.Sprintf("full avg10=0.00 avg60=0.00 avg300=0.00 total=%d\n", waited.Microseconds()))
				}
				r.rounds(1, 0, 16*ms)
			}
			return p.ledger.State().Balance
		}
		if got := rounds(5, false); got != 0 {
			t.Errorf("owed %v, and nobody says that it waits", got)
		}
		if got := rounds(5, true); got < 20*ms {
			t.Errorf("owed %v although it waits", got)
		}
		r.file(filepath.Join(r.cfg.Layout.V2, "web"), "cpu.pressure", "nonsense\n")
		// Everything else continues.
		r.free = false
		for n := range 3 {
			was := p.ledger.State().Credited
			if err := r.next(0, 16*ms); err == nil {
				t.Errorf("round %d with nonsense: %v", n, err)
			}
			if got := p.ledger.State().Credited - was; got != 16*ms {
				t.Errorf("round %d with nonsense: %v booked", n, got)
			}
		}
	})
}

// A container that joins its pod's account does not bring the earlier cost of its packets, and
// leaves their later cost there.
func TestChargeJoins(t *testing.T) {
	for _, h := range []struct {
		name   string
		before cost
	}{
		{"who owes", cost{Charge: 10 * time.Second, Took: 10 * time.Second}},
		{"who is owed", cost{Credit: 10 * time.Second}},
	} {
		t.Run(h.name, func(t *testing.T) {
			r := newChargeRig(t, true, "cpu.max", "50000 100000\n")
			one, two := r.pod()
			must(t, r.Add(one, 0))
			r.rounds(10, 0, 0)
			r.costs[two.ID] = h.before
			must(t, r.Add(two, 0))
			p := r.payers[r.dir]
			for range 5 {
				r.rounds(1, 0, 0)
				if s := p.ledger.State(); r.quota() != 50*ms || s.Charged != 0 || s.Credited != 0 {
					t.Fatalf("quota of %v, %+v", r.quota(), s)
				}
			}
			for range 10 {
				x := r.costs[two.ID]
				x.Charge, x.Took = x.Charge+4*ms, x.Took+4*ms
				r.costs[two.ID] = x
				must(t, r.Add(two, 0)) // as at each refresh
				r.rounds(1, 6*ms, 0)
			}
			must(t, r.Remove(two.ID))
			r.rounds(10, 6*ms, 0)
			if got := p.ledger.State().Charged; got != 10*(4+6+6)*ms {
				t.Errorf("%v were charged", got)
			}
			delete(r.costs, one.ID) // its accounts start again
			r.rounds(10, 6*ms, 0)
			if got := p.ledger.State().Charged; got != (160+9*6)*ms {
				t.Errorf("%v were charged after they went back", got)
			}
		})
	}
}

// pod makes two containers in the rig's cgroup as their pod's.
func (r *chargeRig) pod() (one, two container.Container) {
	one, two = r.container(), r.container()
	two.ID++
	for name, c := range map[string]*container.Container{"one": &one, "two": &two} {
		c.PodCgroup, c.Cgroup.CPU, c.Cgroup.V2 = true, filepath.Join(r.dir, name), filepath.Join(filepath.Dir(c.Cgroup.V2), "web", name)
	}
	return one, two
}

// An idle sibling has no weight, and does not prevent charging others; nor does an idle container
// prevent its own.
func TestChargeIdle(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		sibling := filepath.Join(filepath.Dir(r.dir), "idle")
		weight, idle := "cpu.weight", "0\n" // as it is on Debian's 6.1
		if !r.v2() {
			weight, idle = "cpu.shares", "3\n"
		}
		for name, text := range map[string]string{"cgroup.procs": "", weight: idle, "cpu.idle": "1\n"} {
			r.file(sibling, name, text)
		}
		must(t, r.Add(r.container(), 0))
		p := r.payers[r.dir]
		r.rounds(30, 20*ms, 0)
		if got := r.quota(); got < 39*ms || got > 41*ms {
			t.Errorf("quota of %v beside 10 ms of packets and a sibling that is idle", got)
		}
		if share, err := newShares(r.Charger).of(p); err != nil || share.Fair != min(1, share.Quota) {
			t.Errorf("share %+v, %v", share, err)
		}
		r.file(r.dir, weight, idle)
		r.file(r.dir, "cpu.idle", "1\n")
		r.rounds(60, 0, 0)
		r.rounds(60, 20*ms, 0)
		if got := r.quota(); got < 39*ms || got > 41*ms || p.weight != 0 {
			t.Errorf("quota of %v, weight %d, and it is idle", got, p.weight)
		}
		// Only its weight is left then, and that cannot be changed.
		r.file(r.dir, file, map[string]string{"cpu.max": "max 100000", "cpu.cfs_quota_us": "-1\n"}[file])
		r.ran = 30 * ms
		r.rounds(30, 60*ms, 0)
		if got := r.read(weight); got != strings.TrimSpace(idle) {
			t.Errorf("weight of %q was written", got)
		}
		if b := r.Ledgers()[webID]; math.IsNaN(b.Factor) {
			t.Errorf("a factor that is not a number: %+v", b)
		}
		must(t, r.Remove(webID))
		must(t, r.Add(r.container(), 0)) // it can be charged from the first moment, too
	})
}

// A quota that cannot be written is retried after a pause, or as soon as its owner sets another.
func TestChargeRefused(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(5, 0, 0)
		p, works := r.payers[r.dir], r.cfg.Journal
		refuses, err := journal.Open(t.TempDir(), "")
		must(t, errors.Join(err, refuses.Close()))
		r.cfg.Journal = refuses
		must(t, r.next(20*ms, 0))
		p.begins()
		if _, err := r.write(); err == nil || p.again.Before(time.Now().Add(law.Calm-time.Second)) {
			t.Errorf("%v, and it is tried again at %v", err, p.again)
		}
		must(t, r.next(20*ms, 0))
		p.begins()
		if _, err := r.write(); err != nil || r.read(file) != value {
			t.Errorf("it is tried again at once: %v, quota %q", err, r.read(file))
		}
		r.cfg.Journal, p.again = works, time.Time{}
		r.rounds(1, 20*ms, 0)
		if r.quota() == 50*ms {
			t.Error("it is not tried again though it can be written")
		}
		p.again = time.Now().Add(time.Hour)
		r.file(r.dir, file, strings.Replace(value, "50000", "80000", 1)) // by its owner
		r.rounds(1, 20*ms, 0)
		if r.quota() >= 80*ms {
			t.Errorf("quota of %v, and nothing is tried with the new limit", r.quota())
		}
	})
}

// A setting that cannot be restored at once is restored by a retry.
func TestChargeRestoreFails(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(30, 20*ms, 0)
		roots := r.cfg.Roots
		r.cfg.Roots.Cgroup = t.TempDir() // without the files that were turned
		for range 2 {
			if err := r.Remove(webID); err == nil || !r.Has(webID) {
				t.Fatalf("let go of with a quota of %v in force: %v", r.quota(), err)
			}
		}
		r.rounds(10, 20*ms, 0)
		r.cfg.Roots = roots
		r.ends(file, value)
	})
}

// An earlier agent was killed while a container or a pod was in debt: the next one does not take the
// quota that it finds for the owner's, whichever container of the pod is added first.
func TestChargeAdopts(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		one, two := r.pod()
		for _, next := range [][]container.Container{{r.container()}, {two, one}} {
			owes := next[len(next)-1]
			must(t, r.Add(owes, 0))
			r.rounds(30, 20*ms, 0)
			if r.read(file) == value {
				t.Fatal("nothing is in force")
			}
			r.Charger = idle(r.cfg)
			for _, c := range next {
				must(t, r.Add(c, 0))
				if got := r.payers[r.dir].limit.Quota; got != 50*ms || r.read(file) != value {
					t.Errorf("quota of %v was adopted, %q is in force", got, r.read(file))
				}
			}
			for _, c := range next {
				must(t, r.Remove(c.ID))
			}
		}
	})
}
