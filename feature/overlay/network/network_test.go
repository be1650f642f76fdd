package network

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// The devices of the hosts below.
const (
	own, apart             = 100, 200 // namespaces
	eth0, cni0, flannel1   = 2, 5, 4  // of own
	wg0, veth1             = 7, 11
	vxlan0, br0, veth2, ov = 3, 4, 12, 9 // of apart
)

var addrs = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func ether(index int, name, kind string) netdev.Link {
	return netdev.Link{Index: index, Name: name, Kind: kind, Up: true, Ether: true, PeerNS: -1}
}

func end(netns uint64, index int, master string) container.End {
	host := container.HostEnd{NetNS: netns, Index: index, Master: master, Trusted: true}
	return container.End{Device: container.Device{NetNS: netns, Index: index}, Host: true, Trusted: true, Inside: container.Interface{Host: host}}
}

func vtep(device int, mac, addr string) netdev.Neighbour {
	return netdev.Neighbour{NeighbourKey: netdev.NeighbourKey{Device: device, MAC: mac}, Reach: netdev.Reach{VTEP: netip.MustParseAddr(addr)}}
}

// flannel is a host with Flannel's VXLAN: the bridge of the pods is routed to the tunnel.
func flannel() Host {
	tunnel := netdev.Tunnel{Link: ether(flannel1, "flannel.1", "vxlan"), VNI: 1, Port: 8472, Local: netip.MustParseAddr("192.0.2.1"), Below: eth0}
	return Host{
		Own: own,
		Spaces: []Space{{
			NetNS: own, Path: "/proc/self/ns/net", Trusted: true, Outer: -1, Ports: [2]uint16{32768, 60999},
			Links:   []netdev.Link{ether(1, "lo", "device"), ether(eth0, "eth0", "device"), ether(wg0, "wg0", "wireguard"), ether(cni0, "cni0", "bridge"), tunnel.Link},
			Tunnels: []netdev.Tunnel{tunnel},
			Near:    []netdev.Neighbour{vtep(flannel1, "02:00:00:00:00:02", "192.0.2.2"), vtep(flannel1, "02:00:00:00:00:03", "192.0.2.3"), vtep(99, "02:00:00:00:00:03", "192.0.2.4")},
			Leads:   map[int][]int{flannel1: {eth0}}, State: map[int]qdisc.State{eth0: {Root: "fq_codel"}, flannel1: {Root: "noqueue"}, cni0: {Root: "noqueue"}},
			Routed: map[int]bool{}, Unread: map[int]error{},
		}},
		Ends: []container.End{end(own, veth1, "cni0"), end(own, veth1, "cni0"), end(apart, veth2, "br0"), {Device: container.Device{NetNS: own, Index: 77}}},
	}
}

// swarm is a host with an overlay network of Docker's, in a namespace of its own.
func swarm() Host {
	tunnel := netdev.Tunnel{Link: ether(vxlan0, "vxlan0", "vxlan"), VNI: 4097, Port: 4789, Sources: [2]uint16{1000, 2000}}
	tunnel.Master, tunnel.PeerNS = br0, ov
	return Host{
		Own: own,
		Spaces: []Space{
			{NetNS: own, Trusted: true, Outer: -1, Links: []netdev.Link{ether(1, "lo", "device"), ether(eth0, "eth0", "device"), ether(wg0, "wg0", "wireguard")}, State: map[int]qdisc.State{}},
			{
				NetNS: apart, Path: "/run/docker/netns/1-x", Trusted: true, Outer: ov, Ports: [2]uint16{32768, 60999},
				Links:   []netdev.Link{tunnel.Link, ether(br0, "br0", "bridge"), ether(6, "br1", "bridge")},
				Tunnels: []netdev.Tunnel{tunnel},
				Near:    []netdev.Neighbour{vtep(vxlan0, "02:42:0a:00:00:02", "192.0.2.2")},
				Leads:   map[int][]int{vxlan0: {1, eth0}}, State: map[int]qdisc.State{vxlan0: {Root: "noqueue"}, br0: {Root: "noqueue"}},
			},
		},
		Ends: []container.End{end(apart, veth2, "br0"), end(apart, veth2+1, "br1"), end(own, veth1, "br0")},
	}
}

func TestFind(t *testing.T) {
	for _, c := range []struct {
		name string
		host Host
		want Network
	}{
		{"routed", flannel(), Network{
			NetNS: own, Path: "/proc/self/ns/net", Index: flannel1, Name: "flannel.1", Kind: "vxlan", VNI: 1, Port: 8472, SourcePorts: [2]uint16{32768, 60999},
			VTEPs: []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")}, Uplinks: []Uplink{{Index: eth0, Name: "eth0"}}, Ends: []container.Device{{NetNS: own, Index: veth1}},
		}},
		{"bridged, apart", swarm(), Network{
			NetNS: apart, Path: "/run/docker/netns/1-x", Index: vxlan0, Name: "vxlan0", Kind: "vxlan", VNI: 4097, Port: 4789, SourcePorts: [2]uint16{1000, 2000},
			Bridge: br0, BridgeName: "br0", VTEPs: []netip.Addr{netip.MustParseAddr("192.0.2.2")}, Uplinks: []Uplink{{Index: eth0, Name: "eth0"}}, Ends: []container.Device{{NetNS: apart, Index: veth2}},
		}},
	} {
		if diff := cmp.Diff([]Network{c.want}, Find(c.host), addrs); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

// Devices that are refused, and similar ones that are not.
func TestRefused(t *testing.T) {
	policy := func(change func(*netdev.Policy)) func(*Host, *Space, *netdev.Tunnel) {
		return func(h *Host, _ *Space, _ *netdev.Tunnel) {
			p := netdev.Policy{
				Direction: netdev.Out, Transforms: true, Protocol: 17,
				From: netip.MustParsePrefix("192.0.2.1/32"), To: netip.MustParsePrefix("192.0.2.2/32"), ToPort: netdev.PortMask{Port: 4789, Mask: 0xffff},
			}
			change(&p)
			h.Policies = []netdev.Policy{p}
		}
	}
	tunnel := func(change func(*netdev.Tunnel)) func(*Host, *Space, *netdev.Tunnel) {
		return func(_ *Host, _ *Space, t *netdev.Tunnel) { change(t) }
	}
	state := func(index int, is qdisc.State) func(*Host, *Space, *netdev.Tunnel) {
		return func(_ *Host, s *Space, _ *netdev.Tunnel) { s.State[index] = is }
	}
	outer := func(is qdisc.State) func(*Host, *Space, *netdev.Tunnel) {
		return func(h *Host, _ *Space, _ *netdev.Tunnel) { h.Spaces[0].State[eth0] = is }
	}
	theirs := []qdisc.Hooked{{Kind: "bpf", Program: 7}}
	for _, c := range []struct {
		name   string
		change func(*Host, *Space, *netdev.Tunnel)
		want   []string
	}{
		{"as it is", tunnel(func(*netdev.Tunnel) {}), nil},
		{"collect metadata", tunnel(func(t *netdev.Tunnel) { t.External = true }), []string{External}},
		{"group policy", tunnel(func(t *netdev.Tunnel) { t.GBP = true }), []string{Format}},
		{"TTL and DF inherited", tunnel(func(t *netdev.Tunnel) { t.InheritTTL, t.InheritDF = true, true }), []string{Inherit, Inherit}},
		{"TOS inherited", tunnel(func(t *netdev.Tunnel) { t.InheritTOS = true }), nil},
		{"multicast", tunnel(func(t *netdev.Tunnel) { t.Remote = netip.MustParseAddr("239.1.1.1") }), nil},
		{"IPv6 outside", tunnel(func(t *netdev.Tunnel) { t.Local = netip.MustParseAddr("2001:db8::1") }), nil},
		{"remote checksums", tunnel(func(t *netdev.Tunnel) { t.RemoteCsum = true }), []string{Checksum}},
		{"port of a bond", tunnel(func(t *netdev.Tunnel) { t.Master = 1234 }), []string{Format}},
		{"routed elsewhere", tunnel(func(t *netdev.Tunnel) { t.PeerNS = ov + 1 }), []string{Elsewhere}},
		{"routed in its own namespace", tunnel(func(t *netdev.Tunnel) { t.PeerNS = -1 }), []string{Elsewhere}},
		{"the agent's namespace has no id there", func(_ *Host, s *Space, t *netdev.Tunnel) { s.Outer, t.PeerNS = -1, -1 }, []string{Elsewhere}},
		{"made by a container", func(_ *Host, s *Space, _ *netdev.Tunnel) { s.Trusted = false }, []string{Untrusted}},
		{"WireGuard below", func(h *Host, s *Space, _ *netdev.Tunnel) {
			s.Leads[vxlan0] = []int{wg0}
			h.Spaces[0].Links[2].Ether = false
		}, []string{Link}},
		{"the uplink is shaped", outer(qdisc.State{Root: "htb", Egress: theirs}), nil},
		{"the uplink has tcx", outer(qdisc.State{Ingress: []qdisc.Hooked{{Kind: "tcx", Program: 7}, {Kind: "tcx", Program: 8, Ours: true}}}), nil},
		{"the uplink has a filter", outer(qdisc.State{Ingress: theirs}), []string{Filtered}},
		{"the tunnel is shaped", state(vxlan0, qdisc.State{Root: "tbf"}), []string{Shaped}},
		{"the bridge is shaped", state(br0, qdisc.State{Root: "htb"}), []string{Shaped}},
		{"programs at the tunnel", state(vxlan0, qdisc.State{Root: "noqueue", Egress: theirs}), []string{Filtered}},
		{"programs at the bridge", state(br0, qdisc.State{Ingress: theirs, Egress: theirs}), []string{Filtered}},
		{"programs of ours", state(vxlan0, qdisc.State{Egress: []qdisc.Hooked{{Kind: "tcx", Program: 7, Ours: true}}}), nil},
		{"down", state(vxlan0, qdisc.State{}), nil},
		{"not all is read", func(_ *Host, s *Space, _ *netdev.Tunnel) { s.Unread = map[int]error{br0: errors.New("no")} }, []string{Unread}},
		{"not all policies are read", func(h *Host, _ *Space, _ *netdev.Tunnel) { h.Partly = errors.New("many") }, []string{Unread}},

		{"as Docker encrypts", policy(func(*netdev.Policy) {}), []string{Encrypted}},
		{"what is received is decrypted", policy(func(p *netdev.Policy) { p.Direction, p.From, p.To = netdev.In, p.To, p.From }), []string{Encrypted}},
		{"all is encrypted", policy(func(p *netdev.Policy) { *p = netdev.Policy{Direction: netdev.Out, Transforms: true} }), []string{Encrypted}},
		{"all is dropped", policy(func(p *netdev.Policy) { *p = netdev.Policy{Direction: netdev.Out, Block: true} }), []string{Encrypted}},
		{"a network of nodes", policy(func(p *netdev.Policy) { p.To = netip.MustParsePrefix("192.0.2.0/24") }), []string{Encrypted}},
		{"a policy that lets by", policy(func(p *netdev.Policy) { p.Transforms = false }), nil},
		{"what is forwarded", policy(func(p *netdev.Policy) { p.Direction = netdev.Forward }), nil},
		{"another node", policy(func(p *netdev.Policy) { p.To = netip.MustParsePrefix("192.0.2.9/32") }), nil},
		{"another protocol", policy(func(p *netdev.Policy) { p.Protocol = 6 }), nil},
		{"another port", policy(func(p *netdev.Policy) { p.ToPort.Port = 500 }), nil},
		{"another source port", policy(func(p *netdev.Policy) { p.FromPort = netdev.PortMask{Port: 500, Mask: 0xffff} }), nil},
		{"another device", policy(func(p *netdev.Policy) { p.Device = wg0 }), nil},
		{"the uplink", policy(func(p *netdev.Policy) { p.Device = eth0 }), []string{Encrypted}},
		{"IPv6", policy(func(p *netdev.Policy) { p.From, p.To = netip.MustParsePrefix("::/0"), netip.MustParsePrefix("::/0") }), nil},
	} {
		h := swarm()
		s := &h.Spaces[1]
		c.change(&h, s, &s.Tunnels[0])
		list := Find(h)
		if len(list) != 1 {
			t.Fatalf("%s: %+v", c.name, list)
		}
		var got []string
		for _, r := range list[0].Refused {
			got = append(got, r.Word)
			if len(r.Text) < 20 {
				t.Errorf("%s: %q says nothing", c.name, r.Text)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: refused as %v, want %v", c.name, list[0].Refused, c.want)
		}
	}
}

// Networks that the wire does not distinguish are refused, all of them.
func TestTwins(t *testing.T) {
	h := swarm()
	twin := h.Spaces[1].Tunnels[0]
	twin.Link = ether(flannel1, "vxlan.twin", "vxlan")
	other := twin
	other.Link, other.Port = ether(flannel1+1, "vxlan.other", "vxlan"), 8472
	h.Spaces[0].Tunnels = []netdev.Tunnel{twin, other}
	h.Spaces[0].Links = append(h.Spaces[0].Links, twin.Link, other.Link)
	got := make(map[string][]string)
	for _, n := range Find(h) {
		got[n.Name] = nil
		for _, r := range n.Refused {
			got[n.Name] = append(got[n.Name], r.Word)
		}
	}
	if diff := cmp.Diff(map[string][]string{"vxlan0": {Twin}, "vxlan.twin": {Twin}, "vxlan.other": nil}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Overlays of other kinds are named. An administrator's tunnel is not.
func TestStrangers(t *testing.T) {
	h := flannel()
	s := &h.Spaces[0]
	s.Tunnels = nil
	for i, c := range []struct{ name, kind string }{
		{"tunl0", "ipip"}, {"calico", "ipip"}, {"flannel-wg", "wireguard"}, {"wg1", "wireguard"}, {"ovs-system", "openvswitch"}, {"br-int", "openvswitch"}, {"docker0", "bridge"},
	} {
		s.Links = append(s.Links, ether(20+i, c.name, c.kind))
	}
	s.Routed[21] = true
	for i, name := range []string{"cilium_vxlan", "vxlan_sys_4789", "genev_sys_6081"} {
		tunnel := netdev.Tunnel{Link: ether(30+i, name, "vxlan"), External: true, Port: uint16(4000 + i)}
		s.Links, s.Tunnels = append(s.Links, tunnel.Link), append(s.Tunnels, tunnel)
	}
	got := make(map[string]string)
	for _, n := range Find(h) {
		for _, r := range n.Refused {
			got[n.Name] += r.Word
		}
	}
	want := map[string]string{
		"calico": Kind, "flannel-wg": Encrypted, "ovs-system": External,
		"cilium_vxlan": External, "vxlan_sys_4789": External, "genev_sys_6081": External,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
