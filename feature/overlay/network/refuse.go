package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// options refuses device options that the fast path does not support.
func options(t netdev.Tunnel, refuse func(word, format string, args ...any)) {
	if t.External {
		who := "a program above it decides about each packet"
		switch {
		case strings.HasPrefix(t.Name, "cilium_"):
			who = "Cilium decides about each packet, and has a fast path of its own"
		case strings.HasPrefix(t.Name, "vxlan_sys_"), strings.HasPrefix(t.Name, "genev_sys_"):
			who = "Open vSwitch decides about each packet"
		}
		refuse(External, "%s (external): such a network stays as it is", who)
	}
	for _, f := range []struct {
		has  bool
		name string
	}{{t.GBP, "a group policy (gbp)"}, {t.GPE, "a protocol (gpe)"}, {t.Inner, "packets without Ethernet (innerprotoinherit)"}} {
		if f.has {
			refuse(Format, "its header has %s: make the device without", f.name)
		}
	}
	for _, f := range []struct {
		has  bool
		name string
	}{{t.InheritTTL, "ttl inherit"}, {t.InheritDF, "df inherit"}, {t.InheritLabel, "flowlabel inherit"}} {
		if f.has {
			refuse(Inherit, "each packet's outer header depends on the inner one (%s): make the device without", f.name)
		}
	}
	if t.RemoteCsum {
		refuse(Checksum, "it leaves inner checksums to the receiver (remcsum): make the device without")
	}
}

// taken refuses a device with foreign hooks or queues that packets would bypass.
func taken(s Space, l netdev.Link, refuse func(word, format string, args ...any)) {
	state := s.State[l.Index]
	if shapes(state.Root) {
		refuse(Shaped, "%s has the qdisc %s, which packets would not meet: remove it, or shape the uplink", l.Name, state.Root)
	}
	for _, p := range slices.Concat(state.Ingress, state.Egress) {
		if !p.Ours {
			refuse(Filtered, "%s has %s, which packets would not meet: remove it", l.Name, text(p))
			break
		}
	}
}

// shapes reports whether a root qdisc queues packets. Devices without a queue have noqueue. Devices
// that are down have noop, which dumps omit.
func shapes(root string) bool { return root != "" && root != "noqueue" && root != "noop" }

// behind names a foreign program that runs after our program of this name, or, while that is not
// attached, after all tcx programs.
func behind(list []qdisc.Hooked, name string) string {
	at := slices.IndexFunc(list, func(p qdisc.Hooked) bool { return p.Ours && p.Name == name && name != "" })
	for _, p := range list[at+1:] {
		if !p.Ours && (at >= 0 || p.Kind != "tcx") {
			return text(p)
		}
	}
	return ""
}

// text describes a foreign program or filter.
func text(p qdisc.Hooked) string {
	if p.Program != 0 {
		return fmt.Sprintf("a program (%s, id %d)", p.Kind, p.Program)
	}
	return "a filter (" + p.Kind + ")"
}

// encrypted returns an IPsec policy that may take or drop packets of the network.
func encrypted(policies []netdev.Policy, t netdev.Tunnel, n Network) (netdev.Policy, bool) {
	i := slices.IndexFunc(policies, func(p netdev.Policy) bool {
		local, remote := p.From, p.To
		if p.Direction == netdev.In {
			local, remote = p.To, p.From
		}
		return (p.Transforms || p.Block) && p.Direction != netdev.Forward &&
			(p.Protocol == 0 || p.Protocol == protocolUDP) &&
			p.ToPort.Port&p.ToPort.Mask == n.Port&p.ToPort.Mask && mayBeFrom(p.FromPort, n.SourcePorts) &&
			(p.Device == 0 || slices.ContainsFunc(n.Uplinks, func(u Uplink) bool { return u.Index == p.Device })) &&
			mayBe(local, t.Local) && (len(n.VTEPs) == 0 || slices.ContainsFunc(n.VTEPs, func(a netip.Addr) bool { return mayBe(remote, a) }))
		// The mark is unknown: rules set it.
	})
	if i < 0 {
		return netdev.Policy{}, false
	}
	return policies[i], true
}

const protocolUDP = 17

// mayBeFrom reports whether a selector may match one of the ports. Partial masks and unknown ports
// count as a match.
func mayBeFrom(p netdev.PortMask, ports [2]uint16) bool {
	return p.Mask != 0xffff || ports[1] == 0 || p.Port >= ports[0] && p.Port <= ports[1]
}

// mayBe reports whether an address, if it is known, is in a prefix.
func mayBe(p netip.Prefix, a netip.Addr) bool {
	return !a.IsValid() || !p.IsValid() || p.Contains(a.Unmap())
}

func policyText(p netdev.Policy) string {
	does := "IPsec"
	if p.Block {
		does = "a policy of IPsec that drops"
	}
	direction, peer := "to", p.To
	if p.Direction == netdev.In {
		direction, peer = "from", p.From
	}
	return fmt.Sprintf("%s (ip xfrm policy, %s %s)", does, direction, peer)
}

// twins refuses networks with packets that look the same on the wire.
func twins(list []Network) {
	type wire struct {
		kind string
		vni  uint32
		port uint16
	}
	of := make(map[wire][]int)
	for i, n := range list {
		if n.Port != 0 && !slices.ContainsFunc(n.Refused, func(r Reason) bool { return r.Word == Elsewhere || r.Word == External }) {
			key := wire{n.Kind, n.VNI, n.Port}
			of[key] = append(of[key], i)
		}
	}
	for _, same := range of {
		for _, i := range same {
			if len(same) > 1 {
				other := list[same[0]]
				if i == same[0] {
					other = list[same[1]]
				}
				list[i].Refused = append(list[i].Refused, Reason{Twin, fmt.Sprintf("%s has the same VNI and port: give one of them another", other.Name)})
			}
		}
	}
}

// stranger returns why a device is left alone that looks like an overlay's, but is neither VXLAN nor
// Geneve. It ignores an administrator's own tunnel.
func stranger(s Space, l netdev.Link) (Reason, bool) {
	switch l.Kind {
	case "ipip", "sit", "ip6tnl", "gre", "ip6gre":
		// Each namespace has a default one that is never used.
		if l.Up && s.Routed[l.Index] {
			return Reason{Kind, fmt.Sprintf("it is a tunnel of kind %s, as Calico's IPIP: VXLAN can be accelerated", l.Kind)}, true
		}
	case "wireguard":
		if slices.Contains(wireguards, l.Name) {
			return Reason{Encrypted, "WireGuard encrypts its packets: such a network stays as it is"}, true
		}
	case "openvswitch":
		if l.Name == "ovs-system" {
			return Reason{External, "Open vSwitch decides about each packet: such a network stays as it is"}, true
		}
	}
	return Reason{}, false
}

// wireguards lists the device names of Flannel, Calico, Cilium and Antrea.
var wireguards = []string{"flannel-wg", "flannel-wg-v6", "wireguard.cali", "wg-v6.cali", "cilium_wg0", "antrea-wg0"}
