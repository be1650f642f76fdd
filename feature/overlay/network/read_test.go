package network_test

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// node is a host with an overlay as Flannel builds it, and one of Docker's.
type node struct {
	*testkit.NS
	t                 *testing.T
	pod, box, overlay *testkit.NS
	ends              *hook.Ends
	reader            network.Reader
	list              []container.End // of the pod, and of the container
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{NS: testkit.NetNS(t), t: t, pod: testkit.NetNS(t), box: testkit.NetNS(t), overlay: testkit.NetNS(t)}
	testkit.Veth(t, n.NS, "fluplink", testkit.NetNS(t), "flwire")
	n.Address(t, "fluplink", "192.0.2.1/24")
	h := n.Handle(t)
	far := func(h *netlink.Handle, device string, mac byte, vtep net.IP) {
		l, err := h.LinkByName(device)
		must(t, err)
		must(t, h.LinkSetUp(l))
		must(t, h.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
			IP: vtep, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, mac},
		}))
	}
	uplink, err := h.LinkByName("fluplink")
	must(t, err)
	must(t, h.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 1, Port: 8472, VtepDevIndex: uplink.Attrs().Index, SrcAddr: net.IPv4(192, 0, 2, 1)}))
	far(h, "flannel.1", 2, net.IPv4(192, 0, 2, 2))
	testkit.Veth(t, n.pod, "eth0", n.NS, "flpod")
	n.Port(t, "flpod", "flcni0")

	vxlan := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flvxlan0"}, VxlanId: 4097, Port: 4789}
	must(t, h.LinkAdd(vxlan))
	must(t, h.LinkSetNsFd(vxlan, n.overlay.FD()))
	testkit.Veth(t, n.box, "eth0", n.overlay, "flbox")
	n.overlay.Port(t, "flbox", "flbr0")
	n.overlay.Port(t, "flvxlan0", "flbr0")
	far(n.overlay.Handle(t), "flvxlan0", 3, net.IPv4(192, 0, 2, 3))

	n.ends = hook.Open("/proc", testkit.Journal(t, journal.Open))
	must(t, n.ends.Err())
	own := testkit.Opened(netdev.Open(n.Bind(t)))(t)
	n.reader = network.Reader{Own: own, Path: n.Path, Find: netdev.NewFinder("/proc", time.Now), Look: n.ends.Look, Home: func(uint64) bool { return false }}
	n.list = []container.End{n.end(n.pod, n.NS, "flpod", "flcni0"), n.end(n.box, n.overlay, "flbox", "flbr0")}
	return n
}

func index(t *testing.T, in *testkit.NS, name string) int {
	t.Helper()
	l, err := in.Handle(t).LinkByName(name)
	must(t, err)
	return l.Attrs().Index
}

func (n *node) end(inside, host *testkit.NS, name, master string) container.End {
	n.t.Helper()
	at := container.HostEnd{NetNS: host.Inode, NSPath: host.Bind(n.t), Index: index(n.t, host, name), Name: name, Master: master, Trusted: true}
	return container.End{
		Device: container.Device{NetNS: host.Inode, Index: at.Index}, Name: name, Path: at.NSPath, Host: true, Trusted: true,
		Inside: container.Interface{Name: "eth0", Index: index(n.t, inside, "eth0"), Kind: "veth", Host: at},
	}
}

func (n *node) networks(list []container.End) map[string]network.Network {
	n.t.Helper()
	h, err := n.reader.Read(list)
	must(n.t, err)
	found := make(map[string]network.Network)
	for _, one := range network.Find(h) {
		found[one.Name] = one
	}
	return found
}

func words(n network.Network) (list []string) {
	for _, r := range n.Refused {
		list = append(list, r.Word)
	}
	return list
}

// program attaches a foreign program, as a filter, or one of ours.
func (n *node) program(at hook.Place) {
	n.t.Helper()
	var set hook.Set
	n.t.Cleanup(func() { must(n.t, set.Close()) })
	at.Owner = journal.Owner{Feature: "test"}
	must(n.t, set.Put(n.ends, at, func() (*ebpf.Program, error) {
		const next = -1
		return ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "fl_test", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, next), asm.Return()},
		})
	}))
}

func shape(t *testing.T, in *testkit.NS, device string) {
	t.Helper()
	must(t, in.Handle(t).QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index(t, in, device), Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 1e6, Limit: 30000, Buffer: 20000,
	}))
}

func TestRead(t *testing.T) {
	testkit.OnKernels(t)
	n := newNode(t)
	// Tunnels without known nodes, with an address and without.
	h := n.Handle(t)
	must(t, h.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flalone"}, VxlanId: 2, Port: 8472, SrcAddr: net.IPv4(192, 0, 2, 1)}))
	must(t, h.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flnowhere"}, VxlanId: 3, Port: 8472, Learning: true}))
	uplinks := []network.Uplink{{Index: index(t, n.NS, "fluplink"), Name: "fluplink", MTU: 1500}}
	ports, err := n.reader.Own.LocalPorts()
	must(t, err)
	want := map[string]network.Network{
		"flannel.1": {
			NetNS: n.Inode, Path: n.Path, Index: index(t, n.NS, "flannel.1"), Name: "flannel.1", Kind: "vxlan", VNI: 1, Port: 8472, SourcePorts: ports, MTU: 1450,
			VTEPs: []netip.Addr{netip.MustParseAddr("192.0.2.2")}, Uplinks: uplinks, Ends: []container.Device{n.list[0].Device},
		},
		"flvxlan0": {
			NetNS: n.overlay.Inode, Path: n.list[1].Path, Index: index(t, n.overlay, "flvxlan0"), Name: "flvxlan0", Kind: "vxlan", VNI: 4097, Port: 4789, SourcePorts: ports, MTU: 1500,
			Bridge: index(t, n.overlay, "flbr0"), BridgeName: "flbr0",
			VTEPs: []netip.Addr{netip.MustParseAddr("192.0.2.3")}, Uplinks: uplinks, Ends: []container.Device{n.list[1].Device},
		},
	}
	for i, name := range []string{"flalone", "flnowhere"} {
		want[name] = network.Network{
			NetNS: n.Inode, Path: n.Path, Index: index(t, n.NS, name), Name: name, Kind: "vxlan", VNI: uint32(2 + i), Port: 8472, SourcePorts: ports, MTU: 1500,
			Uplinks: [][]network.Uplink{uplinks, nil}[i], Ends: []container.Device{n.list[0].Device},
		}
	}
	if diff := cmp.Diff(want, n.networks(n.list), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// Nothing is read where a container may have created everything.
	untrusted := slices.Clone(n.list)
	untrusted[1].Trusted = false
	if got := n.networks(untrusted); len(got) != 3 {
		t.Errorf("with an end that is not trusted: %v", got)
	}
	n.reader.Home = func(netns uint64) bool { return netns == n.overlay.Inode }
	if got := n.networks(n.list); len(got) != 3 {
		t.Errorf("with a container in the overlay's namespace: %v", got)
	}
	n.reader.Home = func(uint64) bool { return false }

	// Later changes.
	n.program(hook.Place{Device: container.Device{NetNS: n.Inode, Index: index(t, n.NS, "flannel.1")}, Egress: true, Stage: hook.Observe, Name: "ours"})
	shape(t, n.overlay, "flbr0")
	must(t, n.Do(func() error {
		_, all, _ := net.ParseCIDR("0.0.0.0/0")
		_, peer, _ := net.ParseCIDR("192.0.2.2/32")
		return netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: all, Dst: peer, Dir: netlink.XFRM_DIR_OUT, Proto: unix.IPPROTO_UDP, Action: netlink.XFRM_POLICY_BLOCK})
	}))
	got := n.networks(n.list)
	for name, want := range map[string]string{"flannel.1": network.Encrypted, "flvxlan0": network.Shaped} {
		if words := words(got[name]); !slices.Equal(words, []string{want}) {
			t.Errorf("%s is refused as %v, want %s", name, got[name].Refused, want)
		}
	}
}

func TestReadEnd(t *testing.T) {
	testkit.OnKernels(t)
	n := newNode(t)
	inside, err := netdev.Open(n.box.Path)
	must(t, err)
	defer inside.Close()
	e := n.list[1]
	way := func(when string, in network.Mode, whyIn, whyOut string) {
		t.Helper()
		state, err := n.reader.End(e, inside)
		must(t, err)
		state.Send, state.Arrive = "send", "arrive"
		if w := network.Way(state); w.In != in || w.WhyIn.Word != whyIn || w.WhyOut.Word != whyOut {
			t.Errorf("%s: %+v, want in by %s (%q), out %q", when, w, in, whyIn, whyOut)
		}
	}
	way("as it is", network.Peer, "", "")
	n.program(hook.Place{Device: e.Device, Stage: hook.Redirect, Name: "send"})
	n.program(hook.Place{Device: e.Device, Egress: true, Stage: hook.Observe, Name: "arrive"})
	way("with our programs", network.Peer, "", "")
	must(t, inside.Offload(e.Inside.Index, netdev.GRO).Write(netdev.GRO.On()))
	must(t, inside.Threaded(e.Inside.Index).Write("1"))
	way("in a thread", network.End, network.Thread, "")
	must(t, inside.Threaded(e.Inside.Index).Write("0"))
	n.program(hook.Place{Device: e.Device, Egress: true, Stage: hook.Learn, Name: "learn"})
	way("with another program of ours", network.End, network.Filtered, "")
	n.program(hook.Place{Device: e.Device, Stage: hook.Ceil, Name: "inbound"})
	way("with a ceil for what it sends", network.End, network.Filtered, network.Shaped)
	shape(t, n.overlay, "flbr0")
	way("at a bridge that is shaped", network.Slow, network.Shaped, network.Shaped)
	e.Trusted = false
	way("not trusted", network.Slow, network.Untrusted, network.Untrusted)
}
