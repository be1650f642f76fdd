package traffic_test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// due applies a policy in both directions.
func (h *host) due(c container.Container, egress, ingress policy.Net) error {
	return h.traffic.Apply(h.t.Context(), policy.Target{Container: c, Settings: policy.Settings{Egress: egress, Ingress: ingress}})
}

// In every mode a container's class counts exactly the packets that it receives, once a flow's first
// packet has arrived, though the container never answers.
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
				must(t, testkit.SendDatagrams(flow, datagrams, 100))
				through := h.through(got, was, datagrams)
				if gained := h.arrived(&c).Packets - own; gained != datagrams || through != datagrams {
					t.Errorf("%d packets were sent: %d are in the container's class, %d got through", datagrams, gained, through)
				}
				must(t, h.due(c, policy.Net{}, policy.Net{Weight: 2}))
			}
			h.removes(before, c.ID)
		})
	}
}

// Packets of other containers cannot teach a wrong receiver.
func TestArrivalForged(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	h, box, victim := newBridged(t)
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
	must(t, testkit.SendDatagrams(flow, datagrams, 100))
	if n := h.through(got, was, datagrams); n != datagrams {
		t.Errorf("%d of %d packets got through", n, datagrams)
	}
	// The first packet is in the default class, because the flow is not learnt yet.
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

// A ceil for received packets limits every sender, loses nothing for which its queue has room, and
// leaves no trace.
func TestIngressCeil(t *testing.T) {
	testkit.InFull(t)
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
			testkit.Same(t, "the uplink has been changed", before, h.state())
			testkit.Same(t, "the ceil at the veth", uint64(slow), h.classesOf(at, "hone")[qdisc.MinorDefault].ceil)
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
			testkit.Same(t, "packets that the ceil has dropped", uint64(0), h.passedAt(at, "hone").Drops)
			must(t, h.traffic.Remove(t.Context(), c.ID))
			if now := h.veth(at, "hone"); now != was || len(h.journal.Entries()) != 0 {
				t.Errorf("after Remove: %s, was %s; journal %+v", now, was, h.journal.Entries())
			}
			h.passesFrom(h.wire, net+"2:9000", got, "after Remove packets from the wire")
			h.passesFrom(other, net+"2:9000", got, "after Remove packets from the other container")
		})
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
	testkit.Fails(t, "shares of what is received", err, "cannot be shared on this kernel")
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

// arrived returns the counters of a container's class for packets received on nic0; nil: of the default
// class.
func (h *host) arrived(c *container.Container) qdisc.Stats {
	h.t.Helper()
	return h.counters(h.Index(h.ns, netdev.IFBName(h.nic0, false)), c)
}

// take listens in a box, in a process of its container, so that packets to it cause no answer.
func (h *host) take(box *sandbox.Box) *load.Board {
	h.t.Helper()
	return h.takeAt(box, 9000)
}

// takeAt listens on another port. The socket's buffer holds everything that a test sends, because the
// process may have to wait for a CPU.
func (h *host) takeAt(box *sandbox.Box, port int) *load.Board {
	h.t.Helper()
	return h.run(box, "udp-recv", "--buffer", "8388608", "--listen", fmt.Sprintf("[::]:%d", port))
}

// reach returns the address by which the wire reaches a container of a mode.
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

// through returns how many sent packets a receiver has, once all have arrived or no more arrive.
func (h *host) through(got *load.Board, was load.Reading, sent uint64) uint64 {
	return counted(func() uint64 { return got.Read().Since(was).Ops }, 0, sent)
}

// learnt opens a flow from the wire, by default from any port, and waits until its first packet has
// arrived. After that the host knows its receiver.
func (h *host) learnt(to string, got *load.Board, port ...int) net.Conn {
	h.t.Helper()
	var dialer net.Dialer
	if len(port) > 0 {
		dialer.LocalAddr = &net.UDPAddr{Port: port[0]}
	}
	var flow net.Conn
	must(h.t, h.wire.Do(func() (err error) { flow, err = dialer.Dial("udp", to); return err }))
	h.t.Cleanup(func() { flow.Close() })
	was := got.Read()
	must(h.t, testkit.SendDatagrams(flow, 1, 100))
	if h.through(got, was, 1) == 0 {
		h.t.Fatalf("the first packet to %s is lost", to)
	}
	return flow
}

// neighbour makes a box send what is for an address to the eth0 of another box, whichever box claims it.
func (h *host) neighbour(at *sandbox.Box, dev, addr string, to *sandbox.Box) {
	h.t.Helper()
	must(h.t, at.Neighbour(dev, netip.MustParseAddr(addr), h.MAC(to, "eth0")))
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

// passesFrom waits until all of some packets get through, without further losses.
func (h *host) passesFrom(from *sandbox.Box, to string, got *load.Board, what string) {
	h.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		was := got.Read()
		sent := h.send(from, to)
		if countedFor(time.Second, func() uint64 { return got.Read().Since(was).Ops }, 0, sent) >= sent {
			return
		}
	}
	h.t.Errorf("%s are lost", what)
}

// twoReceivers makes two containers of a mode that the wire can reach.
func (h *host) twoReceivers(mode string) (a, b sender) {
	h.t.Helper()
	a, b, _ = h.two(mode)
	prefix := map[string]string{"routed": "10.67.0.", "overlay": "10.69.0."}[mode]
	if prefix == "" {
		prefix = "10.66.0."
	}
	a.to, b.to = prefix+"2", prefix+"3"
	if mode == "host" {
		a.to, b.to = prefix+"254", prefix+"254"
	}
	return a, b
}

// Two containers receive at once, in every mode: the kernel has the right classes, each packet of a
// known flow is in the class of its receiver, and none is lost.
func TestIngressClasses(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "routed", "overlay", "macvlan", "host") {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			a, b := h.twoReceivers(mode)
			mostly(t, h.due(a.c, policy.Net{}, policy.Net{Weight: 3, Ceil: 600 * mbit}))
			must(t, h.due(b.c, policy.Net{}, policy.Net{Rate: 150 * mbit}))
			// The IFB has 950 Mbit/s, with 902.5 to promise: 150, and of the rest 1 for the host
			// and 3.
			const left = 902_500_000 - 150*mbit
			want := map[uint16]class{
				qdisc.MinorTop: {950 * mbit, 950 * mbit, 0}, qdisc.MinorDefault: {left / 4, 950 * mbit, 0},
				h.minor(a.c): {left / 4 * 3, 600 * mbit, 0}, h.minor(b.c): {150 * mbit, 950 * mbit, 0},
			}
			if is := h.classesOf(h.ns, netdev.IFBName(h.nic0, false)); !maps.Equal(is, want) {
				t.Errorf("classes %v, want %v", is, want)
			}
			testkit.Fails(t, "more than the link", h.due(fake(9), policy.Net{}, policy.Net{Rate: 753 * mbit}), "uplink nic0, what it receives: rate refused: ")
			boards := []*load.Board{h.takeAt(a.box, 9001), h.takeAt(b.box, 9002)}
			one, two := h.learnt(a.to+":9001", boards[0]), h.learnt(b.to+":9002", boards[1])
			own, other := h.arrived(&a.c).Packets, h.arrived(&b.c).Packets
			wasOne, wasTwo := boards[0].Read(), boards[1].Read()
			for range datagrams { // in turns, three to one
				must(t, errors.Join(testkit.SendDatagrams(one, 3, 100), testkit.SendDatagrams(two, 1, 100)))
			}
			for _, r := range []struct {
				c         *container.Container
				got       *load.Board
				before    load.Reading
				was, sent uint64
			}{{&a.c, boards[0], wasOne, own, 3 * datagrams}, {&b.c, boards[1], wasTwo, other, datagrams}} {
				through, st := h.through(r.got, r.before, r.sent), h.arrived(r.c)
				if gained := st.Packets - r.was; gained != r.sent || through != r.sent || st.Drops != 0 {
					t.Errorf("%d packets were sent to %s: %d are in its class, %d dropped, %d got through", r.sent, r.c.Name, gained, st.Drops, through)
				}
			}
		})
	}
}
