package traffic_test

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// holds checks an Apply error about parts that do not hold: nil, a part or an error, and its words.
func holds(t testing.TB, err error, partly bool, words ...string) {
	t.Helper()
	if len(words) == 0 {
		must(t, err)
		return
	}
	testkit.Fails(t, "what does not hold", err, words...)
	testkit.Same(t, "a part of it holds", partly, errors.Is(err, feature.ErrPartly))
}

// mostly fails the test if an Apply has failed, unless a part holds.
func mostly(t testing.TB, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, feature.ErrPartly) {
		t.Fatal(err)
	}
}

// wondershaper gives a device a foreign shaper with filters, which cannot be restored.
func (h *host) wondershaper(dev string) {
	h.t.Helper()
	h.Change(h.ns, dev, func(n *netlink.Handle, l netlink.Link) error {
		index := l.Attrs().Index
		root := netlink.QdiscAttrs{LinkIndex: index, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}
		return errors.Join(
			n.QdiscReplace(&netlink.Htb{QdiscAttrs: root, Version: 3, Rate2Quantum: 10, Defcls: 0x20}),
			n.ClassAdd(netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: index, Handle: 0x10020, Parent: 0x10000}, netlink.HtbClassAttrs{Rate: gbit, Ceil: gbit, Buffer: 5000, Quantum: 2000})),
			n.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: 0x10000, Priority: 1, Protocol: unix.ETH_P_IP}, ClassId: 0x10020}),
		)
	})
}

// A foreign shaper at an uplink affects nothing else: ceils hold at veths, even after a restart, and
// another uplink is shaped.
func TestUplinkOfSomebody(t *testing.T) {
	needSharing(t)
	h, _, one := newBridged(t)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
	far := h.Create(sandbox.Spec{Name: "trfar", Bare: true})
	must(t, sandbox.Wire(sandbox.End{Box: far, Name: "far"}, sandbox.End{Box: h.ns, Name: "nic1"}))
	h.wondershaper("nic0")
	theirs := h.veth(h.ns, "nic0")
	h.start()
	ceil := policy.Net{Ceil: slow}
	check := func(veth string) {
		t.Helper()
		in, out := h.classesOf(h.ns, veth)[qdisc.MinorDefault].ceil, h.classesOf(h.ns, netdev.IFBName(h.Index(h.ns, veth), false))[qdisc.MinorDefault].ceil
		if in != slow || out != slow {
			t.Errorf("%s is held to %d and %d, want %d", veth, in, out, slow)
		}
	}
	holds(t, h.due(one, ceil, ceil), false)
	check("hone")
	const why = "uplink nic0: net.rate is not kept: it already has a shaper of somebody else (htb)"
	holds(t, h.due(two, policy.Net{Ceil: slow, Rate: mbit}, ceil), true, why, "possible with: its removal")
	check("htwo")
	holds(t, h.due(two, policy.Net{Rate: mbit}, policy.Net{}), false, why)
	holds(t, h.due(two, policy.Net{}, policy.Net{Weight: 2}), false) // an IFB does not obstruct it
	// The container is restarted, and then the agent.
	must(t, h.traffic.Remove(t.Context(), one.ID))
	holds(t, h.due(one, ceil, ceil), false)
	check("hone")
	h.others = map[string]uint64{"nic1": gbit}
	h.restart()
	holds(t, h.due(two, policy.Net{Rate: mbit}, policy.Net{}), true, why)
	holds(t, h.due(one, ceil, ceil), false)
	check("hone")
	testkit.Same(t, "the rate at the other uplink", uint64(mbit), h.classesOf(h.ns, "nic1")[h.minor(two)].rate)
	must(t, h.traffic.Remove(t.Context(), one.ID))
	must(t, h.traffic.Remove(t.Context(), two.ID))
	if now := h.veth(h.ns, "nic0"); now != theirs || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %s, was %s; %+v", now, theirs, h.journal.Entries())
	}
}

// A promise that uplinks can no longer keep does not end a veth's ceil.
func TestUplinkTooSlowForAnother(t *testing.T) {
	needSharing(t)
	h, _, one := newBridged(t)
	h.start()
	must(t, h.apply(fake(1), policy.Net{Rate: 900 * mbit}))
	h.traffic.SetRate("nic0", 100*mbit) // as its driver says after a new cable
	ceil := policy.Net{Ceil: slow}
	holds(t, h.due(one, policy.Net{Weight: 1}, ceil), false, "uplink nic0: rate refused")
	holds(t, h.due(one, ceil, ceil), false) // it needs no uplink
	testkit.Same(t, "the ceil at the veth", uint64(slow), h.classesOf(h.ns, "hone")[qdisc.MinorDefault].ceil)
	h.traffic.SetRate("nic0", gbit)
	holds(t, h.due(one, ceil, ceil), false)
}

// The status never covers packets of devices that cannot be limited.
func TestDevicesThatNobodyHolds(t *testing.T) {
	needSharing(t)
	h, _, c := newBridged(t)
	h.start()
	veth := c.Interfaces[0]
	for _, tt := range []struct {
		name  string
		kinds []container.Interface
		word  string // in place of the veth; "": beside it
	}{
		{"no device", nil, "no network device"},
		{"SR-IOV", []container.Interface{{Name: "net1", Kind: "device"}}, "net1 (hardware)"},
		{"netkit", []container.Interface{{Name: "net1", Kind: "netkit"}}, "net1 (netkit)"},
		{"vxlan of the host", []container.Interface{{Name: "net1", Kind: "vxlan", Apart: true}}, "net1 (vxlan)"},
		{"VLAN of the host's NIC", []container.Interface{{Name: "net1", Kind: "vlan", Apart: true}}, "net1 (vlan)"},
		{"tap", []container.Interface{{Name: "net1", Kind: "tuntap"}}, "net1 (tuntap)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			alone := c
			alone.Interfaces = tt.kinds
			ceil := policy.Net{Ceil: slow}
			holds(t, h.due(alone, policy.Net{}, ceil), false, tt.word)
			holds(t, h.due(alone, ceil, policy.Net{Weight: 2}), false, tt.word)
			beside := c
			beside.Interfaces = append([]container.Interface{veth}, tt.kinds...)
			switch tt.name {
			case "no device", "tap": // a VPN's is on top of the veth
				holds(t, h.due(beside, ceil, ceil), false)
			default:
				holds(t, h.due(beside, ceil, ceil), true, tt.word)
			}
			must(t, h.traffic.Remove(t.Context(), c.ID))
		})
	}
}

// tun makes a device without Ethernet headers, like WireGuard's.
func (h *host) tun(name string) {
	h.t.Helper()
	must(h.t, h.ns.Do(func() error {
		f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
		if err != nil {
			return err
		}
		h.t.Cleanup(func() { f.Close() })
		r, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		return unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, r)
	}))
	h.Change(h.ns, name, (*netlink.Handle).LinkSetUp)
}

// Received packets of an uplink without Ethernet headers are not shared, and the status reports that.
// Sent packets are.
func TestUplinkWithoutEthernet(t *testing.T) {
	needSharing(t)
	h := newHost(t, 0)
	h.bridge()
	_, c := h.add("one", "10.66.0.2/24", h.ns)
	h.tun("tun0")
	h.others = map[string]uint64{"tun0": 100 * mbit}
	h.start()
	const why = "uplink tun0: net.ingress.weight is not kept: its packets have no Ethernet header"
	holds(t, h.due(c, policy.Net{}, policy.Net{Weight: 9}), false, why)
	holds(t, h.due(c, policy.Net{Weight: 2}, policy.Net{Weight: 9}), true, why)
	holds(t, h.due(c, policy.Net{}, policy.Net{Weight: 9, Ceil: slow}), true, why)
	testkit.Same(t, "IFBs", 0, h.ifbs())
	holds(t, h.due(c, policy.Net{}, policy.Net{Ceil: slow}), false)
	holds(t, h.due(c, policy.Net{Rate: 10 * mbit}, policy.Net{}), false)
	h.rate = gbit // nic0 as well
	h.restart()
	holds(t, h.due(c, policy.Net{}, policy.Net{Weight: 9}), true, why)
	testkit.Same(t, "IFBs", 1, h.ifbs())
	must(t, h.traffic.Remove(t.Context(), c.ID))
	testkit.None(t, "journal", h.journal.Entries())
}

// Of two ceils at a veth the lower one holds: a CNI plugin's stays, or comes back.
func TestCeilOfSomebody(t *testing.T) {
	h, _, c := newBridged(t)
	h.start()
	index := h.Index(h.ns, "hone")
	root := netlink.QdiscAttrs{LinkIndex: index, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}
	for _, tt := range []struct {
		name  string
		qdisc netlink.Qdisc
		stays bool
		word  string // of the status
	}{
		{"stricter", &netlink.Tbf{QdiscAttrs: root, Rate: 10 * mbit / 8, Limit: 300000, Buffer: 200000}, true, ""},
		{"the same", &netlink.Tbf{QdiscAttrs: root, Rate: 50 * mbit / 8, Limit: 300000, Buffer: 200000}, true, ""},
		{"less strict", &netlink.Tbf{QdiscAttrs: root, Rate: 60 * mbit / 8, Limit: 300000, Buffer: 200000}, false, ""},
		{"no shaper", &netlink.GenericQdisc{QdiscAttrs: root, QdiscType: "pfifo"}, false, ""},
		{"not known", &netlink.Htb{QdiscAttrs: root, Version: 3, Rate2Quantum: 10}, true, "hone: net.ingress.ceil is not kept: it already has a shaper of somebody else (htb)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h.Netlink(h.ns, func(n *netlink.Handle) error { return n.QdiscAdd(tt.qdisc) })
			was := h.veth(h.ns, "hone")
			err := h.due(c, policy.Net{}, policy.Net{Ceil: 50 * mbit})
			if tt.word == "" {
				must(t, err)
			} else {
				holds(t, err, false, tt.word)
				holds(t, h.due(c, policy.Net{Weight: 1}, policy.Net{Ceil: 50 * mbit}), true, tt.word)
			}
			testkit.Same(t, "it stays", tt.stays, h.veth(h.ns, "hone") == was)
			if tt.stays { // it goes, and ours replaces it
				h.Netlink(h.ns, func(n *netlink.Handle) error { return n.QdiscDel(tt.qdisc) })
				must(t, h.due(c, policy.Net{}, policy.Net{Ceil: 50 * mbit}))
				was = h.veth(h.ns, "hone")
				if !strings.Contains(was, qdisc.Ours(qdisc.KindHTB)) {
					t.Errorf("without it there is %s", was)
				}
				must(t, h.traffic.Remove(t.Context(), c.ID))
				return
			}
			must(t, h.traffic.Remove(t.Context(), c.ID))
			testkit.Same(t, "in the end", was, h.veth(h.ns, "hone"))
			h.Netlink(h.ns, func(n *netlink.Handle) error { return n.QdiscDel(tt.qdisc) })
		})
	}
}

// Ours does not replace an uplink's shaper with a lower rate either.
func TestUplinkOfSomebodySlower(t *testing.T) {
	h := newHost(t, gbit)
	h.Netlink(h.ns, func(n *netlink.Handle) error {
		return n.QdiscReplace(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: h.nic0, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 100 * mbit / 8, Limit: 300000, Buffer: 200000})
	})
	h.start()
	theirs := h.state()
	holds(t, h.apply(fake(1), policy.Net{Weight: 1}), false, "somebody else (tbf of 100mbit)", "--uplink nic0=RATE")
	if now := h.state(); now != theirs {
		t.Errorf("now\n%swas\n%s", now, theirs)
	}
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	h.rate = 100 * mbit // the error's advice helps
	h.restart()
	must(t, h.apply(fake(1), policy.Net{Weight: 1}))
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	testkit.Same(t, "in the end", theirs, h.state())
}

// A container with several networks has one ceil for everything it sends, in one queue, and one for
// everything it receives.
func TestCeilOfSeveralNetworks(t *testing.T) {
	needSharing(t)
	h, box, c := newBridged(t)
	network := func(bridge, veth, eth, prefix string) container.Interface {
		must(t, h.ns.Bridge(bridge, netip.MustParsePrefix(prefix+"254/24")))
		h.Wire(sandbox.End{Box: h.ns, Name: veth, Bridge: bridge}, sandbox.End{Box: box, Name: eth, Addr: netip.MustParsePrefix(prefix + "2/24")})
		return h.Veth(box, eth, h.ns, veth)
	}
	one, second, third := c.Interfaces[0], network("br1", "hsecond", "eth1", "10.70.0."), network("br2", "hthird", "eth2", "10.71.0.")
	h.start()
	before := h.state()
	ceil := policy.Net{Ceil: slow}
	c.Interfaces = []container.Interface{one, second}
	holds(t, h.due(c, ceil, policy.Net{}), false)
	if n := h.ifbs(); n != 1 {
		t.Fatalf("there are %d IFBs, want one for both", n)
	}
	held := func() uint64 { return h.passed(h.ns, h.Index(h.ns, "hone")) }
	got := h.take(h.wire)
	h.resolve(box, h.wire, "10.66.0.1:9000")
	was := held()
	h.sendSized(box, "10.66.0.1:9000", datagrams, 100)
	h.sendSized(box, "10.70.0.254:9000", datagrams, 100)
	if n := counted(held, was, 2*datagrams); n < 2*datagrams {
		t.Errorf("of %d packets %d passed the queue", 2*datagrams, n)
	}
	c.Interfaces = []container.Interface{one, second, third}
	holds(t, h.due(c, ceil, ceil), false)
	here, sum := h.take(box), netdev.IFBName(h.Index(h.ns, "hone"), true)
	receives := func(when string, meanwhile func()) {
		t.Helper()
		to := map[string]*sandbox.Box{"10.66.0.2:9000": h.wire, "10.70.0.2:9000": h.ns, "10.71.0.2:9000": h.ns}
		for to, from := range to {
			h.resolve(from, box, to)
		}
		start, was, own := time.Now(), here.Read(), h.passedAt(h.ns, sum).Packets
		for to, from := range to {
			h.startSending(from, to, heldPackets, heldSize)
		}
		h.through(here, was, 1)
		meanwhile()
		n, took := h.through(here, was, 3*heldPackets), time.Since(start)
		if passed := h.passedAt(h.ns, sum).Packets - own; n != 3*heldPackets || passed < n || took < 3*heldFor {
			t.Errorf("%s: of %d packets %d came, %d by the queue of the sum, within %v; the ceil lets them within %v", when, 3*heldPackets, n, passed, took, 3*heldFor)
		}
	}
	again := func() {
		for range 20 {
			holds(t, h.due(c, ceil, ceil), false)
		}
	}
	receives("by three networks", again)
	ns, index := h.Open(h.ns), h.Index(h.ns, sum)
	must(t, h.ns.Delete(sum))
	testkit.Await(t, "another queue of the sum", func() bool { n, err := ns.Index(sum); return err == nil && n != index })
	holds(t, h.due(c, ceil, ceil), false)
	receives("after its IFB was removed", again)
	receives("with the next agent", func() {
		h.restart()
		again()
	})
	for _, forged := range []uint32{qdisc.Handle, qdisc.Handle | qdisc.MinorTop, qdisc.Handle | qdisc.MinorDefault, qdisc.Handle | qdisc.MinorSparse} {
		was := h.passedAt(h.ns, sum).Packets
		h.forge(h.ns, "10.70.0.2:9000", forged, datagrams)
		if n := counted(func() uint64 { return h.passedAt(h.ns, sum).Packets }, was, datagrams); n < datagrams {
			t.Errorf("of %d packets of the host for class %x, %d passed the queue of the sum", datagrams, forged, n)
		}
	}
	// It leaves the network that names the queue, and comes back.
	c.Interfaces = []container.Interface{second}
	holds(t, h.due(c, ceil, ceil), false)
	h.passesFrom(box, "10.66.0.1:9000", got, "of a network that it has left")
	c.Interfaces = []container.Interface{one, second}
	holds(t, h.due(c, ceil, policy.Net{}), false)
	testkit.Same(t, "IFBs", 1, h.ifbs())
	h.removes(before, c.ID)
}

// Without a veth a ceil holds at each uplink, and the status reports that.
func TestCeilAtUplinksOnly(t *testing.T) {
	needSharing(t)
	for _, mode := range []string{"macvlan", "host"} {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			h.others = map[string]uint64{"nic1": gbit}
			far := h.Create(sandbox.Spec{Name: "trfar", Bare: true})
			must(t, sandbox.Wire(sandbox.End{Box: far, Name: "far"}, sandbox.End{Box: h.ns, Name: "nic1"}))
			x, _, _ := h.two(mode)
			h.start()
			ceil := policy.Net{Ceil: slow}
			holds(t, h.due(x.c, ceil, policy.Net{}), true, "net.ceil holds for what passes each of the uplinks nic0, nic1, not for their sum, and not for what stays on this host")
			holds(t, h.due(x.c, policy.Net{Rate: mbit}, ceil), true, "net.ingress.ceil holds for what passes each")
			holds(t, h.due(x.c, policy.Net{Rate: mbit}, policy.Net{Weight: 2}), false)
			must(t, h.traffic.Remove(t.Context(), x.c.ID))
		})
	}
}
