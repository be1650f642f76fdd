package netcpu

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// pair is two siblings without quotas that compute on one CPU.
type pair struct {
	payer, other testkit.CG
	layout       cgroup.Layout
	file         string // of the payer's weight
}

// newPair makes them with weights in parts of the usual one.
func newPair(t *testing.T, payer, other uint64) *pair {
	t.Helper()
	parent := needCPU(t)
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	p := &pair{layout: layout}
	file, usual := "cpu.shares", uint64(usualShares)
	if parent.CPU == parent.V2 {
		file, usual = "cpu.weight", usualWeight
		must(t, os.WriteFile(filepath.Join(parent.V2, "cgroup.subtree_control"), []byte("+cpu"), 0))
	}
	weigh := func(cg testkit.CG, n uint64) {
		must(t, os.WriteFile(filepath.Join(cg.CPU, file), []byte(strconv.FormatUint(n*usual, 10)), 0))
	}
	// What else wants this CPU takes from both; with less than most of it, a part
	// that is due by the CPU as a whole would be too much.
	weigh(parent, 4)
	p.payer, p.other = parent.Child(t, "payer"), parent.Child(t, "other")
	p.file = filepath.Join(p.payer.CPU, file)
	weigh(p.payer, payer)
	weigh(p.other, other)
	burn(t, p.payer, 0)
	burn(t, p.other, 0)
	return p
}

// run tells how much of a CPU each of them ran in the next seconds.
func (p *pair) run(t *testing.T) (payer, other float64) {
	t.Helper()
	read := func() (payer, other time.Duration) {
		payer, err := cgroup.Usage(p.payer.V2)
		must(t, err)
		other, err = cgroup.Usage(p.other.V2)
		must(t, err)
		return payer, other
	}
	began := time.Now()
	a, b := read()
	time.Sleep(2 * time.Second)
	c, d := read()
	took := float64(time.Since(began))
	return float64(c-a) / took, float64(d-b) / took
}

// TestWeightInKernel charges a container without a quota for packets that never
// were, and credits another for time that nobody took: its weight follows, and what
// the kernel gives it and its sibling come to what is due by their owners' weights.
func TestWeightInKernel(t *testing.T) {
	const packets = 0.2 // of a CPU
	for _, c := range []struct {
		name    string
		weights [2]uint64
		charge  float64 // less than 0: a credit
	}{
		{"charge", [2]uint64{1, 1}, packets},
		{"charge of a heavy one", [2]uint64{2, 1}, packets},
		{"credit", [2]uint64{1, 1}, -packets},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, c.weights[0], c.weights[1])
			id, err := cgroup.ID(p.payer.V2)
			must(t, err)
			owners, err := cgroup.Weight(p.payer.CPU)
			must(t, err)
			j, err := journal.Open(t.TempDir())
			must(t, err)
			t.Cleanup(func() { j.Close() })
			var network load
			ch := newCharger(chargeConfig{
				roots: kernel.Default(), layout: p.layout, journal: j, log: slog.New(slog.DiscardHandler),
				read: func() (map[container.ID]cost, error) {
					x := cost{credit: network.cost()}
					if c.charge > 0 {
						x = cost{charge: x.credit, took: x.credit}
					}
					return map[container.ID]cost{container.ID(id): x}, nil
				},
			})
			t.Cleanup(func() { ch.close() })
			must(t, ch.add(container.Container{ID: container.ID(id), Cgroup: container.Cgroup{V2: p.payer.V2, CPU: p.payer.CPU}}, 0))

			// shared waits until both have, in all, what their weights say, and the
			// weight in force is ok.
			shared := func(when string, charge float64, ok func(weight uint64) bool) {
				t.Helper()
				due := float64(c.weights[0]) / float64(c.weights[1])
				for end := time.Now().Add(90 * time.Second); ; {
					payer, other := p.run(t)
					weight, err := cgroup.Weight(p.payer.CPU)
					must(t, err)
					got := (payer + charge) / other / due
					seen := fmt.Sprintf("%s: of a CPU it ran %.3f and is charged %+.1f, its sibling ran %.3f, in all %.3f of what is due; weight %d of %d",
						when, payer, charge, other, got, weight, owners)
					if got > 0.9 && got < 1.1 && ok(weight) {
						t.Log(seen)
						return
					}
					if time.Now().After(end) {
						t.Fatal(seen)
					}
				}
			}
			same := func(weight uint64) bool { return weight == owners && len(j.Entries()) == 0 }
			shared("before", 0, same)
			network.set(max(c.charge, -c.charge))
			p.run(t) // until it has followed
			shared("during", c.charge, func(weight uint64) bool {
				return len(j.Entries()) == 1 && j.Entries()[0].Ref.Object == p.file && (c.charge > 0) == (weight < owners) && weight != owners
			})
			network.set(0)
			p.run(t)
			shared("after", 0, same)

			// Ended while it is charged, the owner's value is back at once.
			network.set(packets)
			for end := time.Now().Add(90 * time.Second); len(j.Entries()) == 0; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("its weight is never turned again")
				}
			}
			must(t, ch.close())
			if w, err := cgroup.Weight(p.payer.CPU); err != nil || !same(w) {
				t.Errorf("weight is %d after close, %v, journal %+v", w, err, j.Entries())
			}
		})
	}
}
