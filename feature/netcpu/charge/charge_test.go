package charge

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// chargeRig is a Charger without a running loop, over cgroups that are files in a temporary folder.
// Its clock advances by two periods a round.
type chargeRig struct {
	*Charger
	t     *testing.T
	dir   string // the container's
	now   time.Time
	n     int
	costs map[container.ID]cost
	// The time that the container's own tasks run in a period, while they are held.
	ran  time.Duration
	used time.Duration
	held int
	free bool // something other than the quota holds them
}

const webID = container.ID(7)

// newChargeRig makes a rig on cgroup v2 or v1.
func newChargeRig(t *testing.T, v2 bool, files ...string) *chargeRig {
	t.Helper()
	root := t.TempDir()
	layout := cgroup.Layout{V2: filepath.Join(root, "unified"), CPU: filepath.Join(root, "cpu")}
	if v2 {
		layout.CPU = layout.V2
	}
	j := testkit.Opened(journal.Open(t.TempDir(), ""))(t)
	r := &chargeRig{t: t, dir: filepath.Join(layout.CPU, "web"), now: time.Now(), costs: make(map[container.ID]cost)}
	r.Charger = idle(Config{
		Feature: "netcpu", Roots: kernel.Roots{Cgroup: root}, Layout: layout, Journal: j, Failed: func(error) {},
		Accounts: func() (account.Reading, error) { return readingOf(r.costs), nil }, Credits: true,
	})
	r.file(filepath.Join(layout.V2, "web"), "cgroup.procs", "")
	r.file(r.dir, "cgroup.procs", "")
	r.file(r.dir, "cpu.idle", "0\n")
	if v2 {
		r.file(r.dir, "cpu.weight", "100\n")
	} else {
		r.file(r.dir, "cpu.shares", "1024\n")
	}
	for i := 0; i < len(files); i += 2 {
		r.file(r.dir, files[i], files[i+1])
	}
	r.stat()
	return r
}

// readingOf returns accounts with these costs.
func readingOf(costs map[container.ID]cost) (r account.Reading) {
	r.Accounts = make(map[container.ID]account.Account)
	for id, c := range costs {
		a := account.Account{Took: c.Took, Robbed: c.Credit}
		a.Receive[account.UDP].CPU = c.Charge
		r.Accounts[id] = a
	}
	return r
}

func (r *chargeRig) file(dir, name, text string) {
	r.t.Helper()
	must(r.t, os.MkdirAll(dir, 0o755))
	must(r.t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
}

// stat writes the kernel's counters.
func (r *chargeRig) stat() {
	text := fmt.Sprintf("usage_usec %d\nnr_periods %d\nnr_throttled %d\n", r.used.Microseconds(), 2*r.n, r.held)
	r.file(r.dir, "cpu.stat", text)
	r.file(filepath.Join(r.cfg.Layout.V2, "web"), "cpu.stat", text)
}

func (r *chargeRig) container() container.Container {
	return container.Container{ID: webID, Name: "web", Cgroup: container.Cgroup{
		V2: filepath.Join(r.cfg.Layout.V2, "web"), CPU: r.dir,
	}}
}

// rounds runs n rounds. In each of them packets cost charge and earn credit in two periods, and the
// tasks use up the quota in force.
func (r *chargeRig) rounds(n int, charge, credit time.Duration) {
	r.t.Helper()
	for range n {
		must(r.t, r.next(charge, credit))
		for _, p := range r.payers { // a period has just begun
			p.begins()
		}
		_, err := r.write()
		must(r.t, err)
	}
}

// begins says that a period begins now.
func (p *payer) begins() { p.pace.start, p.due = time.Now(), time.Now() }

// next is one of these rounds, without its writes.
func (r *chargeRig) next(charge, credit time.Duration) error {
	r.n++
	r.now = r.now.Add(law.Tick)
	if p := r.of[webID]; p.ledger != nil {
		r.used += 2 * p.now
		if !r.free {
			r.held += 2
		}
	} else {
		r.used += 2 * r.ran
	}
	c := r.costs[webID]
	c.Charge, c.Credit, c.Took = c.Charge+charge, c.Credit+credit, c.Took+charge
	r.costs[webID] = c
	r.stat()
	return r.round(r.now)
}

func (r *chargeRig) read(name string) string {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.dir, name))
	must(r.t, err)
	return strings.TrimSpace(string(b))
}

// ends removes the container: a file has its owner's value then, and nothing is left.
func (r *chargeRig) ends(file, owners string) {
	r.t.Helper()
	must(r.t, r.Remove(webID))
	if got := r.read(file); got != owners || r.Has(webID) || len(r.cfg.Journal.Entries()) != 0 {
		r.t.Errorf("%q after remove, want %q; %+v", got, owners, r.cfg.Journal.Entries())
	}
}

// quota reads the quota in force.
func (r *chargeRig) quota() time.Duration {
	r.t.Helper()
	b, err := cgroup.ReadBandwidth(r.dir)
	must(r.t, err)
	return b.Quota
}

// Both hierarchies, with a quota of 50 ms in the form of each. A file in a folder keeps the end of
// a longer value, so all values written here have the same number of digits.
var hierarchies = []struct {
	name  string
	v2    bool
	file  string
	value string
	files []string
}{
	{"v2", true, "cpu.max", "50000 100000", []string{"cpu.max.burst", "0\n", "cpu.weight", "500\n"}},
	{"v1", false, "cpu.cfs_quota_us", "50000", []string{"cpu.cfs_period_us", "100000\n", "cpu.shares", "5000\n"}},
}

func forHierarchies(t *testing.T, run func(t *testing.T, r *chargeRig, file, value string)) {
	for _, h := range hierarchies {
		t.Run(h.name, func(t *testing.T) {
			run(t, newChargeRig(t, h.v2, append([]string{h.file, h.value}, h.files...)...), h.file, h.value)
		})
	}
}

const ms = time.Millisecond

// A container with packets that cost 10 ms of each period has 40 left, and its own quota again some
// time after they end.
func TestChargeQuota(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		must(t, r.Add(r.container(), 0))
		r.rounds(5, 0, 0)
		if got := r.read(file); got != value || len(r.cfg.Journal.Entries()) != 0 {
			t.Errorf("%q was written with nothing to charge", got)
		}
		r.rounds(60, 20*ms, 0)
		if got := r.quota(); got < 39*ms || got > 41*ms {
			t.Errorf("quota of %v beside 10 ms of packets", got)
		}
		e := r.cfg.Journal.Entries()
		if len(e) != 1 || e[0].Before != value || e[0].Owner != r.by(webID) {
			t.Errorf("journal: %+v", e)
		}
		r.rounds(60, 0, 0)
		if got := r.read(file); got != value || len(r.cfg.Journal.Entries()) != 0 {
			t.Errorf("%q afterwards, and %+v", got, r.cfg.Journal.Entries())
		}
		r.rounds(20, 0, 20*ms)
		if got := r.quota(); got < 58*ms {
			t.Errorf("quota of %v when robbed of 10 ms", got)
		}
		all := r.Ledgers()
		sum := all[webID].Charged + all[webID].Credited
		if len(all) != 1 || (sum-1600*ms).Abs() > 10*ms {
			t.Errorf("%v were booked: %+v", sum, all)
		}
		must(t, r.Remove(webID))
		must(t, r.Remove(webID))
		if got := r.read(file); got != value || len(r.cfg.Journal.Entries()) != 0 || len(r.payers)+len(r.of) != 0 {
			t.Errorf("%q after remove, %+v", got, r.payers)
		}
	})
}

// docker update while the quota is ours: the new value counts from then on, and is restored in the
// end.
func TestChargeFollowsOwner(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(30, 20*ms, 0)
		changed := strings.Replace(value, "50000", "80000", 1)
		r.file(r.dir, file, changed)
		for range 60 {
			r.rounds(1, 20*ms, 0)
			if got := r.quota(); got < 55*ms { // the earlier debt remains
				t.Fatalf("quota of %v after it was set to 80 ms", got)
			}
		}
		if got := r.quota(); got < 69*ms || got > 71*ms {
			t.Errorf("quota of %v beside 10 ms of packets", got)
		}
		r.ends(file, changed)
	})
}

// The owner changes it between a decision and its write.
func TestChargeLosesRace(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(30, 20*ms, 0)
		p := r.of[webID]
		p.want = 30 * ms
		changed := strings.Replace(value, "50000", "45000", 1)
		r.file(r.dir, file, changed)
		must(t, r.turnQuota(p, p.want))
		if got := r.read(file); got != changed {
			t.Errorf("%q was written over the owner's %q", got, changed)
		}
		r.ends(file, changed)
	})
}

// The owner removes the quota, and sets one again.
func TestChargeLimitComesAndGoes(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(30, 20*ms, 0)
		none := map[string]string{"cpu.max": "max 100000", "cpu.cfs_quota_us": "-1"}[file]
		r.file(r.dir, file, none)
		weight := map[string]string{"cpu.max": "cpu.weight", "cpu.cfs_quota_us": "cpu.shares"}[file]
		before := r.read(weight)
		r.ran = 50 * ms
		r.rounds(30, 60*ms, 0)
		if got := r.read(file); got != none {
			t.Errorf("a quota of %q was made", got)
		}
		if got := r.read(weight); got == before {
			t.Errorf("weight is %q beside 30 ms of packets", got)
		}
		r.file(r.dir, file, value)
		r.rounds(1, 0, 0)
		if got := r.read(weight); got != before {
			t.Errorf("weight is %q, and there is a quota", got)
		}
		r.ends(file, value)
	})
}

// Without a quota the weight is charged.
func TestChargeWeight(t *testing.T) {
	for _, h := range []struct {
		name, file, value, changed string
		v2                         bool
		files                      []string
	}{
		{"v2", "cpu.weight", "500", "300", true, []string{"cpu.max", "max 100000\n"}},
		{"v1", "cpu.shares", "5000", "3000", false, []string{"cpu.cfs_quota_us", "-1\n", "cpu.cfs_period_us", "100000\n"}},
	} {
		t.Run(h.name, func(t *testing.T) {
			r := newChargeRig(t, h.v2, append([]string{h.file, h.value}, h.files...)...)
			must(t, r.Add(r.container(), 0))
			r.ran = 30 * ms
			r.rounds(5, 0, 0)
			if got := r.read(h.file); got != h.value {
				t.Errorf("weight %q with nothing to charge", got)
			}
			r.rounds(30, 60*ms, 0) // half of its cost is packets; alone it has a whole CPU
			var whole, got int
			fmt.Sscan(h.value, &whole)
			if fmt.Sscan(r.read(h.file), &got); got < whole*6/10 || got > whole*8/10 {
				t.Errorf("weight %d of %d beside packets of 30 ms", got, whole)
			}
			r.file(r.dir, h.file, h.changed)
			r.rounds(10, 60*ms, 0)
			fmt.Sscan(h.changed, &whole)
			if fmt.Sscan(r.read(h.file), &got); got < whole*6/10 || got > whole*8/10 {
				t.Errorf("weight %d of %d after a change", got, whole)
			}
			r.rounds(30, 0, 0)
			if got := r.read(h.file); got != h.changed {
				t.Errorf("weight %q afterwards", got)
			}
			r.rounds(10, 60*ms, 0)
			must(t, r.Remove(webID))
			if got := r.read(h.file); got != h.changed {
				t.Errorf("weight %q after remove", got)
			}
		})
	}
}

// If all quotas together fill the CPU, a credit in the quota finds no time, and the weight provides
// it. The quota takes the debts.
func TestChargeWeightBesideQuota(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		p := r.payers[r.dir]
		own := p.weight
		r.free = true
		r.rounds(30, 0, 20*ms)
		if p.weighs < own*115/100 || r.quota() < 55*ms {
			t.Errorf("weight %d of %d, quota %v: robbed of a fifth", p.weighs, own, r.quota())
		}
		r.rounds(30, 20*ms, 0)
		if p.weighs != own || r.quota() > 45*ms {
			t.Errorf("weight %d of %d, quota %v: it owes a fifth", p.weighs, own, r.quota())
		}
		r.rounds(30, 0, 20*ms)
		r.free = false
		r.rounds(30, 0, 20*ms)
		// More weight would have no effect, and less would be missing in the next round.
		if p.weighs > own*130/100 || r.quota() < 55*ms {
			t.Errorf("weight %d of %d, quota %v: its quota is what holds it", p.weighs, own, r.quota())
		}
		r.free = true
		r.rounds(30, 0, 20*ms)
		must(t, r.Remove(webID))
		if e := r.cfg.Journal.Entries(); len(e) != 0 || r.read(file) != value || p.weighs != own {
			t.Errorf("%q, weight %d and %+v afterwards", r.read(file), p.weighs, e)
		}
	})
}

// The changes last while rounds are made, and lapse after the last.
func TestChargeLapses(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.Add(r.container(), 0))
		r.rounds(30, 20*ms, 0)
		if r.read(file) == value {
			t.Fatal("nothing is in force")
		}
		lapse := func() time.Time {
			list := r.cfg.Journal.Entries()
			if len(list) != 1 || list[0].Expiry.IsZero() {
				t.Fatalf("entries %+v, want one that lapses", list)
			}
			return list[0].Expiry
		}
		last := time.Now().Add(law.Long)
		if at := lapse(); at.After(last) {
			t.Errorf("lapses at %v, want at %v", at, last)
		}
		later := last.Add(law.Long)
		must(t, r.hold(later))
		if got, want := lapse(), later.Add(law.Long); !got.Equal(want.UTC()) {
			t.Errorf("held on until %v, want %v", got, want)
		}
	})
}

// The containers of a pod have one account. When its owner ends, the next container becomes the
// owner.
func TestChargePod(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "50000 100000\n")
	one, two := r.pod()
	must(t, r.Add(one, 0))
	must(t, r.Add(two, 0))
	if len(r.payers) != 1 || r.payers[r.dir] == nil {
		t.Fatalf("%+v", r.payers)
	}
	r.rounds(30, 20*ms, 0)
	if r.quota() == 50*ms {
		t.Error("the pod was not charged")
	}
	must(t, r.Remove(one.ID))
	if got := r.quota(); got != 50*ms || r.payers[r.dir].owner != two.ID {
		t.Errorf("quota %v, owner %v", got, r.payers[r.dir].owner)
	}
	must(t, r.Remove(two.ID))
	if len(r.payers) != 0 {
		t.Errorf("%+v", r.payers)
	}
}

// A container that has ended causes no error and is forgotten.
func TestChargeGone(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "50000 100000\n")
	must(t, r.Add(r.container(), 0))
	r.rounds(30, 20*ms, 0)
	must(t, os.RemoveAll(r.dir))
	must(t, r.round(r.now.Add(time.Second)))
	if _, err := r.write(); err != nil {
		t.Error(err)
	}
	must(t, r.Remove(webID))
	if err := r.Add(r.container(), 0); !errors.Is(err, journal.ErrGone) {
		t.Errorf("add: %v", err)
	}
	if err := r.Add(container.Container{ID: 9}, 0); err == nil {
		t.Error("a container without a cgroup was charged")
	}
}

// An invalid value is reported and changes nothing.
func TestChargeAbsurd(t *testing.T) {
	r := newChargeRig(t, true, "cpu.max", "50000 100000\n")
	must(t, r.Add(r.container(), 0))
	r.file(r.dir, "cpu.max", "-50000 100000\n")
	if err := r.round(r.now); err == nil {
		t.Error("a negative quota was taken")
	}
	if got := r.read("cpu.max"); got != "-50000 100000" {
		t.Errorf("%q was written", got)
	}
}

var must = testkit.Must
