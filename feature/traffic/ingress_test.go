package traffic_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// due applies a policy in both directions.
func (h *host) due(c container.Container, egress, ingress policy.Net) error {
	return h.traffic.Apply(h.t.Context(), policy.Target{Container: c, Settings: policy.Settings{Egress: egress, Ingress: ingress}})
}

// In every mode a container's class gets what it receives, and nothing else, though it never
// answers, after a flow's first packet has arrived.
func TestArrival(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	for _, m := range modes() {
		t.Run(m.name, func(t *testing.T) {
			h := newHost(t, gbit)
			box, c, from := m.make(h)
			to := h.reach(m.name)
			h.start()
			before := h.state()
			h.resolve(box, h.wire, from)
			got := h.take(box)
			must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
			for range 2 { // also when it is applied anew
				flow := h.learnt(to, got)
				own, was := h.arrived(&c).Packets, got.Read()
				must(t, write(flow, datagrams, 100))
				through := h.through(got, was, datagrams)
				if gained := h.arrived(&c).Packets - own; gained != datagrams || through != datagrams {
					paths, _ := h.traffic.Inpaths()
					t.Errorf("%d packets were sent: %d are in the container's class, %d got through; told by %v", datagrams, gained, through, paths)
				}
				must(t, h.due(c, policy.Net{}, policy.Net{Weight: 2}))
			}
			must(t, h.traffic.Remove(t.Context(), c.ID))
			if after := h.state(); after != before {
				t.Errorf("before:\n%safter:\n%s", before, after)
			}
			if left := h.journal.Entries(); len(left) != 0 {
				t.Errorf("journal: %+v", left)
			}
		})
	}
}

// No packet of another container teaches where a flow arrives.
func TestArrivalForged(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, victim := h.add("one", "10.66.0.2/24", h.ns)
	bad, liar := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	got := h.take(box)
	must(t, h.due(victim, policy.Net{}, policy.Net{Weight: 1}))
	must(t, h.due(liar, policy.Net{}, policy.Net{Weight: 1}))
	h.resolve(box, h.wire, "10.66.0.1:9000")
	h.neighbour(h.wire, "wire", "10.66.0.2", box)
	// It takes the victim's address as its source, from the port that the wire will use, and claims
	// every kind of priority.
	h.Address(bad, "eth0", "10.66.0.2/32")
	for _, priority := range []uint32{0, 0x66000000, 0x66fffff0, qdisc.Handle | 1, qdisc.Handle | 2} {
		h.spoof(bad, "10.66.0.2:9000", "10.66.0.1:9999", priority)
	}
	lied, own := h.arrived(&liar).Packets, h.arrived(&victim).Packets
	flow := h.learnt("10.66.0.2:9000", got, 9999)
	was := got.Read()
	must(t, write(flow, datagrams, 100))
	if n := h.through(got, was, datagrams); n != datagrams {
		t.Errorf("%d of %d packets got through", n, datagrams)
	}
	// The first one is in the default class, as no one has taught the flow yet.
	if n := h.arrived(&victim).Packets - own; n != datagrams {
		t.Errorf("%d of %d packets are in the class of the container that they were for", n, datagrams)
	}
	if n := h.arrived(&liar).Packets - lied; n != 0 {
		t.Errorf("%d packets for another are in the class of the container that lied", n)
	}
}

// veth returns the knobs that the feature may turn at the host's end of a veth.
func (h *host) veth(at *sandbox.Box, name string) string {
	h.t.Helper()
	ns, err := netdev.Open(at.NetNS())
	must(h.t, err)
	defer ns.Close() // many look again and again
	index := h.Index(at, name)
	var out []string
	for _, k := range []journal.Knob{qdisc.Root(ns, index), qdisc.QueueLen(ns, index)} {
		v, err := k.Read()
		must(h.t, err)
		out = append(out, k.Ref().Kind+" "+v)
	}
	return strings.Join(out, ", ")
}

// queue gives a device a queue length, as Docker does (0).
func (h *host) queueLen(b *sandbox.Box, dev string, n int) {
	h.t.Helper()
	h.Change(b, dev, func(nl *netlink.Handle, l netlink.Link) error {
		return nl.LinkSetTxQLen(l, n)
	})
}

// A ceil for what a container receives limits every sender, loses nothing that its queue has room
// for, and leaves no trace.
func TestIngressCeil(t *testing.T) {
	testkit.OnKernels(t)
	for _, mode := range []string{"bridge", "overlay, another namespace"} {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			at, net := h.ns, "10.66.0."
			var box *sandbox.Box
			var c container.Container
			if mode == "bridge" {
				h.bridge()
				box, c = h.add("one", "10.66.0.2/24", h.ns)
			} else {
				box, c = h.overlay(true)
				at, net = h.apart, "10.69.0."
			}
			other, _ := h.add("two", net+"3/24", at)
			h.queueLen(at, "hone", 0)
			h.start()
			before, was := h.state(), h.veth(at, "hone")
			must(t, h.due(c, policy.Net{}, policy.Net{Ceil: slow}))
			if h.state() != before {
				t.Errorf("the uplink has been changed:\n%s", h.state())
			}
			if got := h.classesOf(at, "hone")[qdisc.MinorDefault].ceil; got != slow {
				t.Errorf("the ceil at the veth is %d, want %d", got, slow)
			}
			got := h.take(box)
			passed := func() uint64 { return h.passedAt(at, "hone").Packets }
			// From the wire, and from a container of the same host.
			for name, from := range map[string]*sandbox.Box{"wire": h.wire, "other": other} {
				h.resolve(from, box, net+"2:9000")
				own := passed()
				if took := h.held(from, net+"2:9000", got); took < heldFor {
					t.Errorf("from the %s: all came within %v, sooner than the ceil lets them", name, took)
				}
				if n := passed() - own; n < heldPackets || n > heldPackets+heldPackets/4 {
					t.Errorf("from the %s: %d packets were sent, %d met the ceil", name, heldPackets, n)
				}
			}
			if st := h.passedAt(at, "hone"); st.Drops != 0 {
				t.Errorf("the ceil has dropped %d packets", st.Drops)
			}
			must(t, h.traffic.Remove(t.Context(), c.ID))
			if now := h.veth(at, "hone"); now != was || len(h.journal.Entries()) != 0 {
				t.Errorf("after Remove: %s, was %s; journal %+v", now, was, h.journal.Entries())
			}
			h.passesFrom(h.wire, net+"2:9000", got, "after Remove packets from the wire")
			h.passesFrom(other, net+"2:9000", got, "after Remove packets from the other container")
		})
	}
}

// An operator's qdisc at the veth stays, or comes back.
func TestIngressOperator(t *testing.T) {
	h := newHost(t, gbit)
	h.bridge()
	_, c := h.add("one", "10.66.0.2/24", h.ns)
	index := h.Index(h.ns, "hone")
	tbf := func() {
		h.Netlink(h.ns, func(n *netlink.Handle) error {
			return n.QdiscReplace(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 1e8, Limit: 300000, Buffer: 200000})
		})
	}
	tbf()
	h.start()
	was := h.veth(h.ns, "hone")
	must(t, h.due(c, policy.Net{}, policy.Net{Ceil: 50 * mbit}))
	must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{})) // only the other direction is left
	if now := h.veth(h.ns, "hone"); now != was {
		t.Errorf("without a ceil: %s, was %s", now, was)
	}
	must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{Ceil: 50 * mbit}))
	tbf()
	for range 2 {
		err := h.due(c, policy.Net{Weight: 1}, policy.Net{Ceil: 60 * mbit})
		if err == nil || !strings.Contains(err.Error(), "someone has replaced the root qdisc") || !strings.Contains(err.Error(), "the ceil does not hold there") {
			t.Errorf("replaced by someone: %v", err)
		}
	}
	// What the error says helps.
	must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{}))
	must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{Ceil: 60 * mbit}))
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if now := h.veth(h.ns, "hone"); now != was {
		t.Errorf("after Remove: %s, was %s", now, was)
	}
}

// needSharing skips a test on a kernel that cannot share what uplinks receive, after checking that
// it refuses such a policy.
func needSharing(t *testing.T) {
	t.Helper()
	testkit.NeedRoot(t)
	j := testkit.Journal(t, journal.Open)
	if !hook.Open("/proc", j).Filters() {
		return
	}
	h := newHost(t, gbit)
	h.start()
	before := h.state()
	err := h.due(fake(1), policy.Net{}, policy.Net{Weight: 1})
	if err == nil || !strings.Contains(err.Error(), "cannot be shared on this kernel") {
		t.Errorf("shares of what is received: %v", err)
	}
	if h.state() != before || len(h.journal.Entries()) != 0 {
		t.Errorf("refused, but changed:\n%swas\n%s%+v", h.state(), before, h.journal.Entries())
	}
	if !t.Failed() {
		testkit.Skip(t, "kernel cannot share what uplinks receive")
	}
}

// ifbs counts the devices of that kind in the host's namespace.
func (h *host) ifbs() int {
	h.t.Helper()
	links, err := h.Open(h.ns).Links(netdev.MostLinks)
	must(h.t, err)
	n := 0
	for _, l := range links {
		if l.Kind == "ifb" {
			n++
		}
	}
	return n
}

// The agent is killed while ingress of the uplink is shared.
func TestIngressAdopt(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	for _, adopt := range []bool{true, false} {
		t.Run(fmt.Sprint("policy still there ", adopt), func(t *testing.T) { testIngressAdopt(t, adopt) })
	}
}

func testIngressAdopt(t *testing.T, adopt bool) {
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	h.start()
	before, veth := h.state(), h.veth(h.ns, "hone")
	got := h.take(box)
	due := policy.Net{Weight: 3, Ceil: 100 * mbit}
	must(t, h.due(c, policy.Net{Weight: 1}, due))
	entries := len(h.journal.Entries())
	must(t, h.traffic.Close())
	must(t, h.journal.Close())
	was := got.Read()
	sent := h.send(h.wire, "10.66.0.2:9000")
	if n := h.through(got, was, sent); n < sent || h.ifbs() != 1 {
		t.Errorf("after a kill: %d packets were sent, %d got through; %d IFBs", sent, n, h.ifbs())
	}
	h.start()
	if adopt {
		must(t, h.due(c, policy.Net{Weight: 1}, due))
		must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
		if n := len(h.journal.Entries()); n != entries {
			t.Errorf("adopted: %d entries, had %d", n, entries)
		}
		own := h.arrived(&c).Packets
		must(t, write(h.learnt("10.66.0.2:9000", got), datagrams, 100))
		if n := counted(func() uint64 { return h.arrived(&c).Packets }, own, datagrams); n != datagrams {
			t.Errorf("adopted: of %d packets %d are in the container's class", datagrams, n)
		}
		// One direction ends, the other stays.
		must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{}))
	} else {
		// Its policy for what it receives is gone by now.
		must(t, h.due(c, policy.Net{Weight: 1}, policy.Net{}))
		must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
	}
	if now := h.veth(h.ns, "hone"); now != veth || h.ifbs() != 0 {
		t.Errorf("adopt %v, one direction: %s, was %s; %d IFBs", adopt, now, veth, h.ifbs())
	}
	h.removes(before, c.ID)
}

// A foreign device of our name is reported, and left alone.
func TestIngressNameTaken(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.Netlink(h.ns, func(n *netlink.Handle) error {
		return n.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: netdev.IFBName(h.nic0)}})
	})
	h.start()
	before := h.state()
	err := h.due(fake(1), policy.Net{}, policy.Net{Weight: 1})
	if err == nil || !strings.Contains(err.Error(), "somebody's ifb") {
		t.Errorf("the name is taken: %v", err)
	}
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	if h.state() != before || h.ifbs() != 1 || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %d IFBs\n%swas\n%s%+v", h.ifbs(), h.state(), before, h.journal.Entries())
	}
}

// The IFB is deleted, or set down: packets bypass it as soon as that is noticed, and it comes back.
func TestIngressDeviceVanishes(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	h.start()
	got := h.take(box)
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	h.Change(h.ns, netdev.IFBName(h.nic0), (*netlink.Handle).LinkSetDown)
	h.passes(got)
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	h.passes(got)
	must(t, h.ns.Delete(netdev.IFBName(h.nic0)))
	h.passes(got)
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	flow := h.learnt("10.66.0.2:9000", got)
	own, was := h.arrived(&c).Packets, got.Read()
	must(t, write(flow, datagrams, 100))
	if n := h.through(got, was, datagrams); n != datagrams || h.arrived(&c).Packets-own != datagrams {
		t.Errorf("%d packets were sent, %d got through, %d are in the class", datagrams, n, h.arrived(&c).Packets-own)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if n := len(h.journal.Entries()); n != 0 {
		t.Errorf("journal: %+v", h.journal.Entries())
	}
}

// Promises for the other direction are limited to 95 % of 95 % of the uplink.
func TestIngressRefused(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.start()
	must(t, h.due(fake(1), policy.Net{}, policy.Net{Rate: 900 * mbit}))
	err := h.due(fake(2), policy.Net{}, policy.Net{Rate: 3 * mbit})
	if err == nil || !strings.Contains(err.Error(), "uplink nic0, what it receives: rate refused: ") {
		t.Errorf("more than the link: %v", err)
	}
	must(t, h.due(fake(2), policy.Net{Rate: 900 * mbit}, policy.Net{})) // the other direction is another link
}
