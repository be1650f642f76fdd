package traffic_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// due applies a policy in both directions.
func (h *host) due(c container.Container, egress, ingress policy.Net) error {
	return h.traffic.Apply(h.t.Context(), policy.Target{Container: c, Settings: policy.Settings{Egress: egress, Ingress: ingress}})
}

// arrived gives the counters of the class of a container for what nic0
// receives; nil: of everybody else.
func (h *host) arrived(c *container.Container) qdisc.Stats {
	h.t.Helper()
	d, err := qdisc.Open(h.open(h.ns), h.index(h.ns, netdev.IFBName(h.nic0)))
	must(h.t, err)
	defer d.Close()
	all, err := d.Stats(qdisc.KindHTB)
	must(h.t, err)
	if c == nil {
		return all[qdisc.MinorDefault]
	}
	return all[uint16(h.slots.Lookup(slot.Of(*c)))]
}

// take listens in a box, by a process of its container, so that packets to it
// cause no answer.
func (h *host) take(box *sandbox.Box) *load.Board {
	h.t.Helper()
	return h.run(box, "udp-recv", "--listen", "[::]:9000")
}

// reach gives where the wire sends to for a container of a mode to get it.
func (h *host) reach(mode string) string {
	switch {
	case strings.HasPrefix(mode, "overlay"):
		return "10.69.0.2:9000"
	case strings.HasSuffix(mode, "IPv6"):
		return "[fd66::2]:9000"
	case mode == "routed":
		return "10.67.0.2:9000"
	case mode == "NAT":
		must(h.t, ipt(h.ns, "-t", "nat", "-A", "PREROUTING", "-i", "nic0", "-p", "udp", "--dport", "9000", "-j", "DNAT", "--to-destination", "10.67.0.2"))
		return "10.66.0.254:9000"
	case mode == "host":
		return "10.66.0.254:9000"
	}
	return "10.66.0.2:9000"
}

// through gives how many packets a receiver has got of those sent, once it is
// all of them or no more come.
func (h *host) through(got *load.Board, was load.Reading, sent uint64) uint64 {
	return counted(func() uint64 { return got.Read().Since(was).Ops }, 0, sent)
}

// In every mode what a container receives, and nothing else, is in its class,
// though it never answers: all but what comes before a flow's first packet has arrived.
func TestArrival(t *testing.T) {
	needSharing(t)
	for _, m := range modes() {
		if m.mask != 0 {
			continue // the mark has no part in it
		}
		t.Run(m.name, func(t *testing.T) {
			h := newHost(t, gbit)
			h.listen()
			box, c, from := m.make(h)
			to := h.reach(m.name)
			h.start()
			before := h.state()
			h.send(box, from) // so that addresses are resolved
			got := h.take(box)
			must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
			for range 2 { // also when it is applied anew
				own, others, was := h.arrived(&c), h.arrived(nil), got.Read()
				sent := h.send(h.wire, to)
				through := h.through(got, was, sent)
				gained, lost := h.arrived(&c).Packets-own.Packets, h.arrived(nil).Packets-others.Packets
				// Beside the datagrams there may be some packets of the protocols;
				// and on a slow machine a second one of the flow is there before
				// the first has arrived.
				if sent < 50 || gained+1+sent/100 < sent || gained > sent+sent/4 || lost > sent/4 {
					paths, _ := h.traffic.Inpaths()
					t.Errorf("%d packets were sent: %d are in the container's class, %d in everybody's; told by %v", sent, gained, lost, paths)
				}
				if through < sent {
					t.Errorf("%d packets were sent, %d got through", sent, through)
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

// Nothing that another container sends teaches where a flow arrives.
func TestArrivalForged(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, victim := h.add("one", "10.66.0.2/24", h.ns)
	bad, liar := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	h.listen()
	h.take(box)
	must(t, h.due(victim, policy.Net{}, policy.Net{Weight: 1}))
	must(t, h.due(liar, policy.Net{}, policy.Net{Weight: 1}))
	h.send(box, "10.66.0.1:9000")
	h.neighbour(h.wire, "wire", "10.66.0.2", box)
	// It takes the victim's address for a sender's, from the port that the wire
	// will use, and claims every kind of priority.
	h.address(bad, "eth0", "10.66.0.2/32")
	for _, priority := range []uint32{0, 0x66000000, 0x66fffff0, qdisc.Handle | 1, qdisc.Handle | 2} {
		h.spoof(bad, "10.66.0.2:9000", "10.66.0.1:9999", priority)
	}
	before := h.arrived(&liar).Packets
	sent := uint64(0)
	must(t, h.wire.Do(func() error {
		c, err := (&net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP("10.66.0.1"), Port: 9999}}).Dial("udp", "10.66.0.2:9000")
		if err != nil {
			return err
		}
		defer c.Close()
		for ; sent < 50 && err == nil; sent++ {
			_, err = c.Write(make([]byte, 100))
		}
		return err
	}))
	if n := counted(func() uint64 { return h.arrived(&victim).Packets }, 0, sent); n+10 < sent {
		t.Errorf("%d of %d packets are in the class of whom they were for", n, sent)
	}
	if n := h.arrived(&liar).Packets - before; n > 2 { // neighbour discovery
		t.Errorf("%d of %d packets for another are in the class of who lied", n, sent)
	}
}

// neighbour has a box send what is for an address to the eth0 of another box,
// whoever claims it.
func (h *host) neighbour(at *sandbox.Box, dev, addr string, to *sandbox.Box) {
	h.t.Helper()
	var mac net.HardwareAddr
	h.netlink(to, func(n *netlink.Handle) error {
		l, err := n.LinkByName("eth0")
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	h.netlink(at, func(n *netlink.Handle) error {
		l, err := n.LinkByName(dev)
		if err != nil {
			return err
		}
		return n.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP(addr), HardwareAddr: mac, State: netlink.NUD_PERMANENT})
	})
}

// spoof sends some datagrams from an address and port to another.
func (h *host) spoof(b *sandbox.Box, from, to string, priority uint32) {
	h.t.Helper()
	local, err := net.ResolveUDPAddr("udp", from)
	must(h.t, err)
	must(h.t, b.Do(func() error {
		c, err := (&net.Dialer{LocalAddr: local}).Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		return sendAs(c.(*net.UDPConn), priority, 5)
	}))
}

// veth gives the knobs that the feature may turn at the host's end of a veth.
func (h *host) veth(at *sandbox.Box, name string) string {
	h.t.Helper()
	ns, index := h.open(at), h.index(at, name)
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
	h.netlink(b, func(nl *netlink.Handle) error {
		l, err := nl.LinkByName(dev)
		if err != nil {
			return err
		}
		return nl.LinkSetTxQLen(l, n)
	})
}

// A ceil for what a container receives holds whoever sends, and leaves no trace.
func TestIngressCeil(t *testing.T) {
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
				at, net = h.last("troverlay"), "10.69.0."
			}
			other, _ := h.add("two", net+"3/24", at)
			h.queueLen(at, "hone", 0)
			h.start()
			before, was := h.state(), h.veth(at, "hone")
			must(t, h.due(c, policy.Net{}, policy.Net{Ceil: 50 * mbit}))
			if h.state() != before {
				t.Errorf("the uplink has been changed:\n%s", h.state())
			}
			got := h.run(box, "udp-recv", "--listen", ":9001")
			// From the wire, and from a container of the same host.
			for name, from := range map[string]*sandbox.Box{"wire": h.wire, "other": other} {
				cmd, board, err := load.Command("udp-send", "--to", net+"2:9001", "--rate", "20000", "--size", "1400", "--for", "1500ms")
				must(t, err)
				p, err := from.Start(cmd)
				must(t, err)
				time.Sleep(300 * time.Millisecond)
				first, start := got.Read(), time.Now()
				time.Sleep(time.Second)
				rate := float64(got.Read().Since(first).Bytes) * 8 * 1442 / 1400 / time.Since(start).Seconds()
				must(t, p.Wait())
				sent := board.Read().Since(load.Reading{}).Bytes
				board.Close()
				if rate > 51*mbit || rate < 40*mbit && sent > 10_000_000 {
					t.Errorf("from the %s: %.1f Mbit/s with a ceil of 50", name, rate/mbit)
				}
			}
			must(t, h.traffic.Remove(t.Context(), c.ID))
			if now := h.veth(at, "hone"); now != was || len(h.journal.Entries()) != 0 {
				t.Errorf("after Remove: %s, was %s; journal %+v", now, was, h.journal.Entries())
			}
		})
	}
}

// Whoever has put a qdisc at the veth keeps it, or gets it back.
func TestIngressOperator(t *testing.T) {
	h := newHost(t, gbit)
	h.bridge()
	_, c := h.add("one", "10.66.0.2/24", h.ns)
	index := h.index(h.ns, "hone")
	tbf := func() {
		h.netlink(h.ns, func(n *netlink.Handle) error {
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

// needSharing skips a test on a kernel that cannot share what uplinks receive,
// once it has seen that such a policy is refused there.
func needSharing(t *testing.T) {
	t.Helper()
	testkit.NeedRoot(t)
	j, err := journal.Open(t.TempDir())
	must(t, err)
	defer j.Close()
	hooks, err := qdisc.OpenHooks(netdev.NewFinder("/proc", time.Now), j)
	must(t, err)
	if !hooks.Filters() {
		return
	}
	h := newHost(t, gbit)
	h.start()
	before := h.state()
	err = h.due(fake(1), policy.Net{}, policy.Net{Weight: 1})
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
	links, err := h.open(h.ns).Links(netdev.MostLinks)
	must(h.t, err)
	n := 0
	for _, l := range links {
		if l.Kind == "ifb" {
			n++
		}
	}
	return n
}

// The agent is killed while what the uplink receives is shared.
func TestIngressAdopt(t *testing.T) {
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
		h.send(h.wire, "10.66.0.2:9000")
		if h.arrived(&c).Packets == 0 {
			t.Error("adopted: nothing is in the container's class")
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
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if h.state() != before || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end:\n%swas\n%s%+v", h.state(), before, h.journal.Entries())
	}
}

// A device of our name that is somebody's is told of, and left alone.
func TestIngressNameTaken(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.netlink(h.ns, func(n *netlink.Handle) error {
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

// The IFB vanishes under us, or is set down: packets pass it by as soon as that
// is seen, and the next round makes another.
func TestIngressDeviceVanishes(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	h.start()
	got := h.take(box)
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	h.netlink(h.ns, func(n *netlink.Handle) error {
		l, err := n.LinkByName(netdev.IFBName(h.nic0))
		if err != nil {
			return err
		}
		return n.LinkSetDown(l)
	})
	h.passes(got)
	if err := h.due(c, policy.Net{}, policy.Net{Weight: 1}); err == nil || !strings.Contains(err.Error(), "down") {
		t.Errorf("the IFB is down: %v", err)
	}
	h.passes(got)
	must(t, h.ns.Delete(netdev.IFBName(h.nic0)))
	h.passes(got)
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	was := got.Read()
	sent := h.send(h.wire, "10.66.0.2:9000")
	if n := h.through(got, was, sent); n < sent || h.arrived(&c).Packets+1 < sent {
		t.Errorf("%d packets were sent, %d got through, %d in the class", sent, n, h.arrived(&c).Packets)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if n := len(h.journal.Entries()); n != 0 {
		t.Errorf("journal: %+v", h.journal.Entries())
	}
}

// passes waits until packets from the wire get through.
func (h *host) passes(got *load.Board) {
	h.t.Helper()
	for range 20 {
		was := got.Read()
		if sent := h.send(h.wire, "10.66.0.2:9000"); h.through(got, was, sent) >= sent {
			return
		}
	}
	h.t.Error("packets from the wire are lost")
}

// What is promised of an uplink's other direction is 95 % of 95 % of it.
func TestIngressRefused(t *testing.T) {
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
