package netdev

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

// addrs compares what has addresses.
var addrs = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

// Tunnels are read as they were made, also one that was moved into another namespace, as Docker
// does.
func TestTunnels(t *testing.T) {
	testkit.OnKernels(t)
	host, inside := testkit.NetNS(t), testkit.NetNS(t)
	h := host.Handle(t)
	testkit.Veth(t, host, "fluplink", testkit.NetNS(t), "flwire")
	host.Address(t, "fluplink", "192.0.2.1/24")
	uplink, err := h.LinkByName("fluplink")
	must(t, err)
	below := uplink.Attrs().Index
	v4, v6 := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")
	for _, c := range []struct {
		made netlink.Link
		want Tunnel
	}{
		// The kernel's default is to send checksums.
		{&netlink.Vxlan{VxlanId: 1, Port: 8472, VtepDevIndex: below, SrcAddr: net.IPv4(192, 0, 2, 1)},
			Tunnel{VNI: 1, Port: 8472, Below: below, Local: netip.MustParseAddr("192.0.2.1"), Checksum: true}},
		{&netlink.Vxlan{VxlanId: 2, Port: 4789, Learning: true, GBP: true, TOS: 1, PortLow: 1000, PortHigh: 2000, Group: v4.AsSlice()},
			Tunnel{VNI: 2, Port: 4789, GBP: true, InheritTOS: true, Sources: [2]uint16{1000, 2000}, Remote: v4, Checksum: true}},
		{&netlink.Vxlan{VxlanId: 3, Port: 4790, Group: v6.AsSlice(), UDP6ZeroCSumTx: true, UDP6ZeroCSumRx: true},
			Tunnel{VNI: 3, Port: 4790, Remote: v6, Checksum: true}},
		{&netlink.Vxlan{FlowBased: true, Port: 4791},
			Tunnel{Port: 4791, External: true, Checksum: true}},
		{&netlink.Geneve{ID: 5, Dport: 6081, Remote: v4.AsSlice(), Tos: 1},
			Tunnel{VNI: 5, Port: 6081, Remote: v4, InheritTOS: true, Sources: [2]uint16{1, 65535}}},
	} {
		*c.made.Attrs() = netlink.LinkAttrs{Name: "fltunnel"}
		err := h.LinkAdd(c.made)
		if c.made.Type() == "geneve" && errors.Is(err, unix.EOPNOTSUPP) {
			t.Log("kernel has no geneve")
			continue
		}
		must(t, err)
		for _, at := range []*testkit.NS{host, inside} {
			if at == inside {
				must(t, h.LinkSetNsFd(c.made, inside.FD()))
			}
			ns := open(t, at.Path)
			list, err := ns.Tunnels(MostLinks)
			must(t, err)
			if len(list) != 1 {
				t.Fatalf("there are %d tunnels: %+v", len(list), list)
			}
			if diff := cmp.Diff(c.want, list[0], cmpopts.IgnoreFields(Tunnel{}, "Link"), addrs); diff != "" || list[0].Kind != c.made.Type() {
				t.Errorf("%s (-want +got):\n%s", list[0].Kind, diff)
			}
			id := -1
			if at == inside {
				id, err = ns.ID(open(t, host.Path))
				must(t, err)
			}
			testkit.Same(t, "outer packets are routed in netns", id, list[0].PeerNS)
		}
		hi := inside.Handle(t)
		l, err := hi.LinkByName("fltunnel")
		must(t, err)
		must(t, hi.LinkDel(l))
	}
	ns := open(t, host.Path)
	testkit.Is(t, "at most one device", testkit.Err(ns.Tunnels(1)), ErrMany)
	testkit.Gives(t, "devices to v4", []int{below})(ns.RouteTo(v4, netip.Addr{}, 0))
	testkit.Gives(t, "devices to v4 from an address", []int{below})(ns.RouteTo(v4, netip.MustParseAddr("192.0.2.1"), below))
	testkit.Is(t, "device to v6", testkit.Err(ns.RouteTo(v6, netip.Addr{}, 0)), errNoRoute)
	if ports, err := ns.LocalPorts(); err != nil || ports[0] == 0 || ports[1] <= ports[0] {
		t.Errorf("local ports %v, %v", ports, err)
	}
}

// A tunnel's destinations, as Flannel sets it up: a route with a gateway, that one's neighbour
// entry, and the FDB.
func TestReach(t *testing.T) {
	testkit.OnKernels(t)
	kit := testkit.NetNS(t)
	h := kit.Handle(t)
	vxlan := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "fltunnel"}, VxlanId: 1, Port: 8472}
	must(t, h.LinkAdd(vxlan))
	index := vxlan.Index
	must(t, h.LinkSetUp(vxlan))
	kit.Address(t, "fltunnel", "10.244.0.0/32")
	mac, _ := net.ParseMAC("02:00:00:00:00:07")
	gateway, vtep := net.IPv4(10, 244, 1, 0).To4(), net.IPv4(192, 0, 2, 2).To4()
	_, dst, _ := net.ParseCIDR("10.244.1.0/24")
	must(t, h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: dst, Gw: gateway, Flags: int(netlink.FLAG_ONLINK)}))
	must(t, h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: gateway, HardwareAddr: mac}))
	must(t, h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, IP: vtep, HardwareAddr: mac}))
	ns := open(t, kit.Path)
	routes, err := ns.Routes(index, 1000)
	must(t, err)
	routes = slices.DeleteFunc(routes, func(r Route) bool { return r.To.Addr().Is6() })
	want := []Route{{To: netip.MustParsePrefix("10.244.1.0/24"), Device: index}}
	testkit.Same(t, "routes", want, routes, addrs)
	near, err := ns.Neighbours(MostNeighbours)
	must(t, err)
	for _, want := range []Neighbour{
		{NeighbourKey{Device: index, Addr: netip.MustParseAddr("10.244.1.0")}, Reach{LLAddr: mac.String()}},
		{NeighbourKey{Device: index, MAC: mac.String()}, Reach{VTEP: netip.MustParseAddr("192.0.2.2")}},
	} {
		if !slices.Contains(near, want) {
			t.Errorf("%+v is not in %+v", want, near)
		}
	}
	if list, err := ns.Neighbours(1); !errors.Is(err, ErrMany) || len(list) != 1 {
		t.Errorf("one is looked at: %v, %v", list, err)
	}
}

// The policies of Docker's encrypted networks, and others.
func TestPolicies(t *testing.T) {
	testkit.OnKernels(t)
	kit := testkit.NetNS(t)
	ns := open(t, kit.Path)
	if list, err := ns.Policies(10); err != nil || len(list) != 0 {
		t.Errorf("policies of a new namespace: %v, %v", list, err)
	}
	one, other := net.IPv4(192, 0, 2, 1), net.IPv4(192, 0, 2, 2)
	host := func(ip net.IP) *net.IPNet { return &net.IPNet{IP: ip.To4(), Mask: net.CIDRMask(32, 32)} }
	_, net6, _ := net.ParseCIDR("2001:db8::/32")
	policies := []netlink.XfrmPolicy{
		{Src: host(one), Dst: host(other), Proto: netlink.XFRM_PROTO_ESP, Dir: netlink.XFRM_DIR_IN, Action: netlink.XFRM_POLICY_BLOCK},
		{Src: host(one), Dst: host(other), Proto: unix.IPPROTO_UDP, DstPort: 4789, Mark: &netlink.XfrmMark{Value: 0xD0C4E3, Mask: 0xffffffff}, Dir: netlink.XFRM_DIR_OUT,
			Tmpls: []netlink.XfrmPolicyTmpl{{Src: one, Dst: other, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TRANSPORT, Spi: 7}}},
		{Src: net6, Dst: net6, Dir: netlink.XFRM_DIR_FWD},
	}
	for i := range policies {
		err := kit.Do(func() error { return netlink.XfrmPolicyAdd(&policies[i]) })
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			testkit.Skip(t, "kernel has no xfrm")
		}
		must(t, err)
	}
	list, err := ns.Policies(10)
	must(t, err)
	slices.SortFunc(list, func(a, b Policy) int { return int(a.Direction) - int(b.Direction) })
	from, to, prefix := netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("2001:db8::/32")
	want := []Policy{
		{Direction: In, From: from, To: to, Protocol: unix.IPPROTO_ESP, Block: true},
		{Direction: Out, From: from, To: to, Protocol: unix.IPPROTO_UDP, ToPort: PortMask{4789, 0xffff}, Transforms: true},
		{Direction: Forward, From: prefix, To: prefix},
	}
	testkit.Same(t, "policies", want, list, addrs)
	if list, err := ns.Policies(2); !errors.Is(err, ErrMany) || len(list) != 2 {
		t.Errorf("two are looked at: %v, %v", list, err)
	}
}

func FuzzParseTunnel(f *testing.F) {
	link := func(kind string, data ...*nl.RtAttr) []byte {
		info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
		info.AddRtAttr(unix.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
		about := info.AddRtAttr(unix.IFLA_INFO_DATA, nil)
		for _, a := range data {
			about.AddChild(a)
		}
		return append(nl.NewIfInfomsg(unix.AF_UNSPEC).Serialize(), info.Serialize()...)
	}
	f.Add(link("vxlan", nl.NewRtAttr(unix.IFLA_VXLAN_ID, nl.Uint32Attr(7)), nl.NewRtAttr(unix.IFLA_VXLAN_GROUP, []byte{192, 0, 2, 1}), nl.NewRtAttr(unix.IFLA_VXLAN_PORT_RANGE, []byte{1, 2})))
	f.Add(link("geneve", nl.NewRtAttr(unix.IFLA_GENEVE_ID, nl.Uint32Attr(7)), nl.NewRtAttr(unix.IFLA_GENEVE_PORT, []byte{1})))
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00,\x00\x12\x00\t\x00\x01\x00vxlan\x00\x00\x00\x1c\x00\x02\x00\b\x00\x01\x00\a\x00\x00\x00\x00\b\x00\x01\x00\a\x02\x01\x06\x00\n\x00\x01\x02\x00\x00"))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		tunnel, ok, err := parseTunnel(msg)
		if ok && (err != nil || !tunnel.IsTunnel()) || len(msg) < unix.SizeofIfInfomsg && err == nil {
			t.Errorf("%+v, %v, %v", tunnel, ok, err)
		}
	})
}

func FuzzParseNeighbour(f *testing.F) {
	head := make([]byte, unix.SizeofNdMsg)
	f.Add(append(slices.Clone(head), nl.NewRtAttr(unix.NDA_DST, []byte{192, 0, 2, 1}).Serialize()...))
	fdb := append([]byte{unix.AF_BRIDGE}, head[1:]...)
	f.Add(append(fdb, nl.NewRtAttr(unix.NDA_LLADDR, []byte{2, 0, 0, 0, 0, 7}).Serialize()...))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		n, ok, err := parseNeighbour(msg)
		if ok && (err != nil || n.FDB() == n.Addr.IsValid()) {
			t.Errorf("%+v, %v", n, err)
		}
	})
}

func FuzzParseRoute(f *testing.F) {
	head := (&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Dst_len: 24, Type: unix.RTN_UNICAST}}).Serialize()
	f.Add(append(slices.Clone(head), nl.NewRtAttr(unix.RTA_DST, []byte{192, 0, 2, 0}).Serialize()...))
	f.Add(head)
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if r, ok, err := parseRoute(msg); ok && (err != nil || !r.To.IsValid()) {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

func FuzzParsePolicy(f *testing.F) {
	f.Add(make([]byte, nl.SizeofXfrmUserpolicyInfo))
	f.Add(append(make([]byte, nl.SizeofXfrmUserpolicyInfo), nl.NewRtAttr(int(nl.XFRMA_MARK), []byte{1, 2, 3, 4}).Serialize()...))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if p, ok, err := parsePolicy(msg); ok && (err != nil || p.Direction > Forward) {
			t.Errorf("%+v, %v", p, err)
		}
	})
}
