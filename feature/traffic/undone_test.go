package traffic_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// until waits for a state, and fails the test with the last one seen.
func until(t testing.TB, what string, seen func() (state string, good bool)) {
	t.Helper()
	testkit.AwaitNone(t, func() string {
		state, good := seen()
		if good {
			return ""
		}
		return what + ": last seen: " + state
	})
}

// deleteRoot does `tc qdisc del dev DEV root`.
func (h *host) deleteRoot(dev string) {
	h.t.Helper()
	h.Change(h.ns, dev, func(n *netlink.Handle, l netlink.Link) error {
		return n.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_ROOT}, QdiscType: "htb"})
	})
}

// Everything of ours that is removed or changed comes back without a call of Apply, and packets get
// through.
func TestPutBack(t *testing.T) {
	testkit.InFull(t)
	testkit.Later(t)
	needSharing(t)
	t.Parallel()
	h, box, c := newBridged(t)
	h.start()
	before := h.state()
	there, here := h.take(h.wire), h.take(box)
	all := policy.Net{Weight: 3, Ceil: 50 * mbit}
	must(t, h.due(c, all, all))
	veth, own, shared := "hone", netdev.IFBName(h.Index(h.ns, "hone"), false), netdev.IFBName(h.nic0, false)
	classes := func(dev string) func() string {
		return func() string {
			if links, err := h.Open(h.ns).Links(netdev.MostLinks); err != nil || !slices.ContainsFunc(links, func(l netdev.Link) bool { return l.Name == dev && l.Up }) {
				return fmt.Sprintf("%s is not there, or down", dev)
			}
			return fmt.Sprint(h.classesOf(h.ns, dev))
		}
	}
	count := func(dev string, at ebpf.AttachType) func() string {
		return func() string { return fmt.Sprintf("%d programs", len(h.Programs(h.ns, dev, at))) }
	}
	filters := func(dev string) func() (n string) {
		return func() (n string) {
			h.Change(h.ns, dev, func(nl *netlink.Handle, l netlink.Link) error {
				list, err := nl.FilterList(l, qdisc.Handle)
				n = fmt.Sprintf("%d filters", len(list))
				return err
			})
			return n
		}
	}
	remove := func(dev string) func() { return func() { must(t, h.ns.Delete(dev)) } }
	down := func(dev string) func() {
		return func() { h.Change(h.ns, dev, (*netlink.Handle).LinkSetDown) }
	}
	for _, tt := range []struct {
		name  string
		undo  func()
		shown func() string
	}{
		{"root of the uplink", func() { h.deleteRoot("nic0") }, classes("nic0")},
		{"root of the veth", func() { h.deleteRoot(veth) }, classes(veth)},
		{"root of the veth's IFB", func() { h.deleteRoot(own) }, classes(own)},
		{"root of the uplink's IFB", func() { h.deleteRoot(shared) }, classes(shared)},
		{"the veth's IFB", remove(own), classes(own)},
		{"the veth's IFB is down", down(own), classes(own)},
		{"the uplink's IFB", remove(shared), classes(shared)},
		{"the uplink's IFB is down", down(shared), classes(shared)},
		{"a class", func() {
			h.Change(h.ns, veth, func(n *netlink.Handle, l netlink.Link) error {
				return n.ClassChange(netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: l.Attrs().Index, Handle: qdisc.Handle | qdisc.MinorDefault, Parent: qdisc.Handle | qdisc.MinorTop},
					netlink.HtbClassAttrs{Rate: gbit, Ceil: gbit, Buffer: 5000, Cbuffer: 5000}))
			})
		}, classes(veth)},
		{"the filter of a ceil", func() {
			h.Change(h.ns, veth, func(n *netlink.Handle, l netlink.Link) error {
				return n.FilterDel(&netlink.GenericFilter{FilterType: "bpf", FilterAttrs: netlink.FilterAttrs{LinkIndex: l.Attrs().Index, Parent: qdisc.Handle, Priority: 2, Protocol: unix.ETH_P_ALL}})
			})
		}, filters(veth)},
		{"the sysctl", func() { must(t, h.ns.Sysctl("ipv4/ip_forward_update_priority", "1")) }, func() string {
			v, err := qdisc.ForwardPriority("/proc", h.Open(h.ns)).Read()
			must(t, err)
			return v
		}},
		{"programs where the veth receives", func() {
			for _, id := range h.Programs(h.ns, veth, ebpf.AttachTCXIngress) {
				must(t, topology.Detach(id))
			}
		}, count(veth, ebpf.AttachTCXIngress)},
		{"programs where the veth sends", func() { must(t, topology.Detach(h.Programs(h.ns, veth, ebpf.AttachTCXEgress)[0])) }, count(veth, ebpf.AttachTCXEgress)},
		{"programs where the uplink receives", func() { must(t, topology.Detach(h.Programs(h.ns, "nic0", ebpf.AttachTCXIngress)[0])) }, count("nic0", ebpf.AttachTCXIngress)},
		{"programs where the uplink sends", func() { must(t, topology.Detach(h.Programs(h.ns, "nic0", ebpf.AttachTCXEgress)[0])) }, count("nic0", ebpf.AttachTCXEgress)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := tt.shown()
			h.traffic.Quiesce(func() {
				tt.undo()
				if tt.shown() == want {
					t.Error("nothing was undone")
				}
			})
			until(t, tt.name, func() (string, bool) { is := tt.shown(); return is, is == want })
			held := h.passedAt(h.ns, own).Packets
			h.passesFrom(box, "10.66.0.1:9000", there, "packets to the wire")
			if n := h.passedAt(h.ns, own).Packets - held; n < datagrams {
				t.Errorf("%d packets met the ceil", n)
			}
			h.passesFrom(h.wire, "10.66.0.2:9000", here, "packets from the wire")
		})
	}
	must(t, h.due(c, all, all))
	h.removes(before, c.ID)
}

// After three repairs within an hour the next removal is left alone, and the status reports it without
// being asked. The same holds for a replacement.
func TestDispute(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h, _, c := newBridged(t)
	clock := testkit.NewClock()
	h.now = clock.Now
	h.start()
	told := make(chan container.ID, 1000)
	h.traffic.Notify(func(id container.ID) { told <- id })
	ceil := policy.Net{Ceil: 50 * mbit}
	apply := func() error { return h.due(c, policy.Net{}, ceil) }
	must(t, apply())
	root := func() string { return h.veth(h.ns, "hone") }
	ours := root()
	remove := func() { h.traffic.Quiesce(func() { h.deleteRoot("hone") }) } // during a repair it does not count
	for range 3 {
		remove()
		until(t, "it is put back", func() (string, bool) { return root(), root() == ours })
	}
	must(t, apply())
	for len(told) > 0 {
		<-told
	}
	remove()
	until(t, "it is told", func() (string, bool) { return root(), len(told) > 0 })
	testkit.Same(t, "told of", c.ID, <-told)
	for range 2 {
		holds(t, apply(), false, "hone: net.ingress.ceil is not kept: somebody has undone it again and again", "the root qdisc was removed, 3 times")
	}
	if root() == ours {
		t.Error("it was put back a fourth time")
	}
	clock.Advance(time.Hour)
	must(t, apply())
	testkit.Same(t, "an hour later", ours, root())
	// A foreign qdisc is left alone, and reported, until it disappears.
	tbf := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: h.Index(h.ns, "hone"), Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 1e8, Limit: 300000, Buffer: 200000}
	h.Netlink(h.ns, func(n *netlink.Handle) error { return n.QdiscReplace(tbf) })
	<-told
	holds(t, apply(), false, "someone has replaced the root qdisc")
	h.Netlink(h.ns, func(n *netlink.Handle) error { return n.QdiscDel(tbf) })
	until(t, "ours is there again", func() (string, bool) { return root(), root() == ours })
	must(t, apply())
	must(t, h.traffic.Remove(t.Context(), c.ID))
	testkit.None(t, "journal", h.journal.Entries())
}

// The socket program of a container in the host's network comes back, too.
func TestPutBackAtCgroup(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.Address(h.ns, "nic0", "10.66.0.254/24")
	box := h.Create(sandbox.Spec{Name: "one", Network: h.ns})
	c := h.describe(box)
	h.start()
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 2}))
	list := func() (ids []link.ID) {
		for id, l := range testkit.Links(t) {
			info, err := l.Info()
			if err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == uint64(c.ID) {
				ids = append(ids, id)
			}
		}
		return ids
	}
	was := list()
	if len(was) != 1 {
		t.Fatalf("programs at the cgroup: %v", was)
	}
	must(t, topology.Detach(was[0]))
	until(t, "the program is there", func() (string, bool) { is := list(); return fmt.Sprint(is), len(is) == 1 && is[0] != was[0] })
	must(t, h.traffic.Remove(t.Context(), c.ID))
}
