package traffic_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// pod is a group of containers that share a network, with one veth to the host's bridge.
type pod struct {
	*host
	members []container.Container
}

func newPod(t testing.TB, names ...string) *pod {
	t.Helper()
	testkit.NeedRoot(t)
	p := &pod{host: newHost(t, gbit)}
	p.bridge()
	box, first := p.add(names[0], "10.66.0.2/24", p.ns)
	p.members = append(p.members, first)
	for _, n := range names[1:] {
		c := p.describe(p.Create(sandbox.Spec{Name: n, Network: box}))
		c.Interfaces = first.Interfaces
		p.members = append(p.members, c)
	}
	return p
}

// root returns the qdisc at the host end of the pod's veth, and the one that shapes what the pod sends
// there.
func (p *pod) root() string {
	p.t.Helper()
	ns := p.Open(p.ns)
	veth := p.members[0].Interfaces[0].Host.Index
	knobs := []journal.Knob{qdisc.Root(ns, veth), ns.IFB(veth, false)}
	if index, err := ns.Index(netdev.IFBName(veth, false)); err == nil {
		knobs = append(knobs, qdisc.Root(ns, index))
	}
	var out []string
	for _, k := range knobs {
		v, err := k.Read()
		must(p.t, err)
		out = append(out, v)
	}
	return strings.Join(out, ", ")
}

// sweep undoes entries of containers that have ended, as the agent does.
func (h *host) sweep(alive ...container.ID) {
	h.t.Helper()
	_, err := h.journal.Restore(kernel.Opener(kernel.Default()), func(e journal.Entry) bool {
		return e.Owner.Container != 0 && !slices.Contains(alive, container.ID(e.Owner.Container))
	})
	must(h.t, err)
}

// A container of a pod moves to a separate network. The others take over its entries, and it gets the
// same due there.
func TestPodMemberMoves(t *testing.T) {
	p := newPod(t, "one", "two")
	_, apart := p.add("three", "10.66.0.3/24", p.ns)
	p.start()
	before := p.root()
	one, two := p.members[0], p.members[1]
	ceil := policy.Net{Ceil: 50 * mbit}
	must(t, p.due(one, ceil, ceil))
	must(t, p.due(two, ceil, ceil))
	during, slot := p.root(), p.slots.Lookup(two.TenantKey())
	moved := one
	moved.NetNS, moved.PID, moved.Interfaces = apart.NetNS, apart.PID, apart.Interfaces
	for range 2 {
		must(t, p.due(moved, ceil, ceil))
	}
	if got := p.slots.Lookup(moved.TenantKey()); got == identity.Nobody || got == slot {
		t.Errorf("it has slot %d in its own network, and the others have %d", got, slot)
	}
	must(t, p.due(two, policy.Net{Ceil: 40 * mbit}, ceil)) // it does not obstruct that
	must(t, p.due(two, ceil, ceil))
	must(t, p.traffic.Remove(t.Context(), one.ID))
	p.sweep(two.ID)
	testkit.Same(t, "one has moved: the root", during, p.root())
	must(t, p.traffic.Remove(t.Context(), two.ID))
	if got := p.root(); got != before || len(p.journal.Entries()) != 0 {
		t.Errorf("all have left: the root is %s, was %s; %+v", got, before, p.journal.Entries())
	}
}

// Whatever the containers of a pod do, in any order, with the agent killed in between: the due that
// they agree on is in force, at the uplink and at the veth, a container is refused only for
// disagreement, and nothing stays behind.
func TestPodRandom(t *testing.T) {
	needSharing(t)
	p := newPod(t, "one", "two", "three")
	p.start()
	before, root := p.state(), p.root()
	wishes := []policy.Net{{}, {Rate: 10 * mbit}, {Ceil: 40 * mbit}, {Rate: 10 * mbit, Ceil: 40 * mbit}}
	random := rand.New(rand.NewPCG(1, 2))
	running := make(map[int]policy.Net)
	for round := range testkit.Scale(t, 15, 60) {
		var did []string
		for range 1 + random.IntN(4) {
			i := random.IntN(len(p.members))
			switch random.IntN(5) {
			case 0:
				did = append(did, fmt.Sprintf("%d ends", i))
				delete(running, i)
				must(t, p.traffic.Remove(t.Context(), p.members[i].ID))
			case 1:
				did = append(did, "killed")
				must(t, p.traffic.Close())
				must(t, p.journal.Close())
				if random.IntN(2) == 0 { // while there is no agent
					did = append(did, fmt.Sprintf("%d has ended", i))
					delete(running, i)
				}
				p.start()
			default:
				running[i] = wishes[random.IntN(len(wishes))]
				did = append(did, fmt.Sprintf("%d wants %+v", i, running[i]))
				p.due(p.members[i], running[i], running[i]) // it may be refused
			}
		}
		// In the end all have the same policy, or none.
		want := wishes[random.IntN(len(wishes))]
		var alive []container.ID
		asks := 0
		for i := range running {
			alive = append(alive, p.members[i].ID)
			if running[i] != (policy.Net{}) {
				running[i] = want
				asks++
			}
		}
		for range 2 { // like a worker, which retries a failure
			for i, net := range running {
				p.due(p.members[i], net, net)
			}
		}
		for i, net := range running {
			if err := p.due(p.members[i], net, net); err != nil {
				t.Fatalf("round %d, %v: %d of %d that agree on %+v: %v", round, did, i, asks, want, err)
			}
		}
		must(t, p.traffic.Prune(t.Context(), func(id container.ID) bool { return slices.Contains(alive, id) }))
		p.sweep(alive...)
		shaped := asks > 0 && want != (policy.Net{})
		divided := asks > 0 && want.Rate != 0
		if held := p.root() != root; held != (shaped && want.Ceil != 0) {
			t.Fatalf("round %d, %v: %d agree on %+v, and the root of the veth is %s", round, did, asks, want, p.root())
		}
		if n := len(p.classes()); divided && n != 3 || !divided && p.state() != before {
			t.Fatalf("round %d, %v: %d agree on %+v, and there are %d classes; the host:\n%s", round, did, asks, want, n, p.state())
		}
		if n := len(p.journal.Entries()); !shaped && n != 0 {
			t.Fatalf("round %d, %v: nobody asks for anything, and the journal has %+v", round, did, p.journal.Entries())
		}
	}
}
