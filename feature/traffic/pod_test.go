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

// pod is containers that share a network, with one veth to the host's bridge.
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

// root is the qdisc at the host end of the pod's veth, and what shapes what the pod sends by it.
func (p *pod) root() string {
	p.t.Helper()
	ns := p.Open(p.ns)
	veth := p.members[0].Interfaces[0].Host.Index
	knobs := []journal.Knob{qdisc.Root(ns, veth), ns.IFB(veth)}
	if index, err := ns.Index(netdev.IFBName(veth)); err == nil {
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

// sweep undoes entries of containers that have ended, like the agent.
func (h *host) sweep(alive ...container.ID) {
	h.t.Helper()
	_, err := h.journal.Restore(kernel.Opener(kernel.Default()), func(e journal.Entry) bool {
		return e.Owner.Container != 0 && !slices.Contains(alive, container.ID(e.Owner.Container))
	})
	must(h.t, err)
}

// The policy of all containers of a pod is changed, one after the other: while they differ, the
// last agreement holds.
func TestPodChangesItsPolicy(t *testing.T) {
	p := newPod(t, "one", "two", "three")
	p.start()
	for _, c := range p.members {
		must(t, p.apply(c, policy.Net{Rate: 100 * mbit}))
	}
	due := func(want uint64) {
		t.Helper()
		if got := p.classes()[uint16(p.slots.Lookup(identity.TenantOf(p.members[0])))]; got != want {
			t.Errorf("%d bit/s are guaranteed, want %d", got, want)
		}
	}
	refused := func(i, because int, net policy.Net) {
		t.Helper()
		err := p.apply(p.members[i], net)
		if err == nil || !strings.Contains(err.Error(), "container "+p.members[because].ID.String()) {
			t.Errorf("container %d: %v, want that %d is in the way", i, err, p.members[because].ID)
		}
	}
	refused(0, 1, policy.Net{Rate: 200 * mbit})
	refused(1, 2, policy.Net{Rate: 200 * mbit})
	due(100 * mbit)
	must(t, p.apply(p.members[2], policy.Net{Rate: 200 * mbit}))
	due(200 * mbit)
	must(t, p.apply(p.members[0], policy.Net{Rate: 200 * mbit}))
	must(t, p.apply(p.members[1], policy.Net{Rate: 200 * mbit}))

	// A container that disagrees goes, or has no policy any more: the others get theirs.
	refused(0, 1, policy.Net{Rate: 300 * mbit})
	must(t, p.apply(p.members[1], policy.Net{}))
	refused(0, 2, policy.Net{Rate: 300 * mbit})
	must(t, p.traffic.Remove(t.Context(), p.members[2].ID))
	due(200 * mbit)
	must(t, p.apply(p.members[0], policy.Net{Rate: 300 * mbit}))
	due(300 * mbit)
	// A container that was never in does not hold up the others.
	refused(2, 0, policy.Net{Rate: 400 * mbit})
	must(t, p.apply(p.members[0], policy.Net{Rate: 350 * mbit}))
	due(350 * mbit)
}

// One container owns the entry of the ceil at a pod's veth. When it ends, the others take over, in
// any order of arrival.
func TestPodKeepsItsCeil(t *testing.T) {
	p := newPod(t, "one", "two", "three")
	p.start()
	before := p.root()
	ids := func(members []container.Container) (out []container.ID) {
		for _, c := range members {
			out = append(out, c.ID)
		}
		return out
	}
	for _, leaves := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		for _, c := range p.members {
			must(t, p.due(c, policy.Net{Ceil: 60 * mbit}, policy.Net{Ceil: 50 * mbit}))
		}
		during := p.root()
		if during == before {
			t.Fatal("there is no ceil")
		}
		left := slices.Clone(p.members)
		for _, i := range leaves[:2] {
			left = slices.DeleteFunc(left, func(c container.Container) bool { return c.ID == p.members[i].ID })
			must(t, p.traffic.Remove(t.Context(), p.members[i].ID))
			p.sweep(ids(left)...)
			if got := p.root(); got != during {
				t.Fatalf("%v have left: the root is %s, was %s", leaves, got, during)
			}
			for _, c := range left {
				must(t, p.due(c, policy.Net{Ceil: 60 * mbit}, policy.Net{Ceil: 50 * mbit}))
			}
		}
		must(t, p.traffic.Remove(t.Context(), p.members[leaves[2]].ID))
		if got := p.root(); got != before || len(p.journal.Entries()) != 0 {
			t.Fatalf("all have left: the root is %s, was %s; %+v", got, before, p.journal.Entries())
		}
	}
}

// The agent is killed, and the container that owns the ceil's entry ends before there is another
// agent.
func TestPodCeilIsInherited(t *testing.T) {
	p := newPod(t, "one", "two")
	p.start()
	before := p.root()
	one, two := p.members[0], p.members[1]
	ceil := policy.Net{Ceil: 50 * mbit}
	must(t, p.due(one, ceil, ceil))
	must(t, p.due(two, ceil, ceil))
	during := p.root()
	must(t, p.traffic.Close())
	must(t, p.journal.Close())
	p.start()
	must(t, p.due(two, ceil, ceil))
	p.sweep(two.ID)
	must(t, p.due(two, ceil, ceil))
	if got := p.root(); got != during {
		t.Fatalf("the root is %s, was %s", got, during)
	}
	must(t, p.traffic.Remove(t.Context(), two.ID))
	if got := p.root(); got != before || len(p.journal.Entries()) != 0 {
		t.Fatalf("all have left: the root is %s, was %s; %+v", got, before, p.journal.Entries())
	}
}

// A container of a pod moves to a network of its own: the others take over its entries, and it is
// due there what it was.
func TestPodMemberMoves(t *testing.T) {
	p := newPod(t, "one", "two")
	_, apart := p.add("three", "10.66.0.3/24", p.ns)
	p.start()
	before := p.root()
	one, two := p.members[0], p.members[1]
	ceil := policy.Net{Ceil: 50 * mbit}
	must(t, p.due(one, ceil, ceil))
	must(t, p.due(two, ceil, ceil))
	during, slot := p.root(), p.slots.Lookup(identity.TenantOf(two))
	moved := one
	moved.NetNS, moved.PID, moved.Interfaces = apart.NetNS, apart.PID, apart.Interfaces
	for range 2 {
		must(t, p.due(moved, ceil, ceil))
	}
	if got := p.slots.Lookup(identity.TenantOf(moved)); got == identity.Nobody || got == slot {
		t.Errorf("it has slot %d in its own network, and the others have %d", got, slot)
	}
	must(t, p.due(two, policy.Net{Ceil: 40 * mbit}, ceil)) // which it is not in the way of
	must(t, p.due(two, ceil, ceil))
	must(t, p.traffic.Remove(t.Context(), one.ID))
	p.sweep(two.ID)
	if got := p.root(); got != during {
		t.Errorf("one has moved: the root is %s, was %s", got, during)
	}
	must(t, p.traffic.Remove(t.Context(), two.ID))
	if got := p.root(); got != before || len(p.journal.Entries()) != 0 {
		t.Errorf("all have left: the root is %s, was %s; %+v", got, before, p.journal.Entries())
	}
}

// Whatever the containers of a pod do, in any order, with the agent killed in between: what they
// agree on is in force, at the uplink and at the veth, only disagreement refuses a container, and
// nothing is left.
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
