package charge

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"

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
	file         string // with the payer's weight
}

// newPair makes two siblings with weights in parts of the usual one.
func newPair(t *testing.T, payer, other uint64) *pair {
	t.Helper()
	parent := needCPU(t)
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	p := &pair{layout: layout}
	knob, weight := cgroup.WeightKnob(parent.CPU, parent.CPU == parent.V2)
	file := filepath.Base(knob.Ref().Object)
	if parent.CPU == parent.V2 {
		must(t, os.WriteFile(filepath.Join(parent.V2, "cgroup.subtree_control"), []byte("+cpu"), 0))
	}
	weigh := func(cg testkit.CG, n uint64) {
		must(t, os.WriteFile(filepath.Join(cg.CPU, file), []byte(strconv.FormatUint(n*weight.Usual, 10)), 0))
	}
	// Other users of this CPU take time from both; with less than most of it, a share that is
	// computed from the whole CPU would be too much.
	weigh(parent, 4)
	p.payer, p.other = parent.Child(t, "payer"), parent.Child(t, "other")
	p.file = filepath.Join(p.payer.CPU, file)
	weigh(p.payer, payer)
	weigh(p.other, other)
	burn(t, p.payer, 0)
	burn(t, p.other, 0)
	return p
}

// TestWeightInKernel charges a container without a quota for packets that do not exist, and credits
// another for time that was not taken. The kernel has its weight lowered or raised, and its owner's
// again once that has ended, or the Charger has.
func TestWeightInKernel(t *testing.T) {
	testkit.OnKernels(t)
	t.Parallel()
	const packets = 0.2 // of a CPU
	for _, c := range []struct {
		name    string
		weights [2]uint64
		charge  float64 // negative: a credit
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
			j := testkit.Journal(t, journal.Open)
			var network load
			ch := New(Config{
				Feature: "netcpu",
				Roots:   kernel.Default(), Layout: p.layout, Journal: j, Log: slog.New(slog.DiscardHandler),
				Read: func() (map[container.ID]Cost, error) {
					x := Cost{Credit: network.cost()}
					if c.charge > 0 {
						x = Cost{Charge: x.Credit, Took: x.Credit}
					}
					return map[container.ID]Cost{container.ID(id): x}, nil
				},
			})
			t.Cleanup(func() { ch.Close() })
			must(t, ch.Add(container.Container{ID: container.ID(id), Cgroup: container.Cgroup{V2: p.payer.V2, CPU: p.payer.CPU}}, 0))

			weight := func() uint64 {
				w, err := cgroup.Weight(p.payer.CPU)
				must(t, err)
				return w
			}
			seen := func() string {
				return fmt.Sprintf("the weight is %d, the owner's %d, the journal %+v", weight(), owners, j.Entries())
			}
			turned := func(when string) {
				t.Helper()
				waitFor(t, "another weight "+when, func() (bool, string) {
					w, notes := weight(), j.Entries()
					return len(notes) == 1 && notes[0].Ref.Object == p.file && notes[0].Before == strconv.FormatUint(owners, 10) &&
						w != owners && (c.charge > 0) == (w < owners), seen()
				})
			}
			network.set(max(c.charge, -c.charge))
			turned("while packets come")
			network.set(0)
			waitFor(t, "its owner's weight", func() (bool, string) { return weight() == owners && len(j.Entries()) == 0, seen() })
			network.set(packets)
			turned("once more")
			must(t, ch.Close())
			if weight() != owners || len(j.Entries()) != 0 {
				t.Errorf("after close %s", seen())
			}
		})
	}
}
