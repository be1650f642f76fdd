// Package network finds the overlay networks of this host: the tunnel devices of containers, the
// uplinks of their packets, and why one is left alone. It also chooses the path of packets to and from
// a container's end. It decides only on what Read has read, loads no BPF and changes nothing. Feature
// overlay calls it.
package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Network is a tunnel device, and the host ends of containers behind it.
type Network struct {
	NetNS       uint64 // inode of the device's namespace
	Path        string // of that namespace
	Index       int    // of the device
	Name        string // "flannel.1"
	Kind        string // "vxlan", "geneve"; if refused also "ipip", "wireguard", ...
	VNI         uint32
	Port        uint16    // UDP destination
	SourcePorts [2]uint16 // first and last outer source port
	InheritTOS  bool      // the outer TOS is the inner one
	Bridge      int       // index of its bridge, in NetNS; 0: it is no port, and packets are routed to it
	BridgeName  string
	MTU         int // of the device

	VTEPs   []netip.Addr       // known ones of other nodes, sorted; 256 at most
	Uplinks []Uplink           // for packets in both directions, sorted; empty while none is known
	Ends    []container.Device // host ends of its containers: ports of the bridge, or all in NetNS; sorted

	Refused []Reason // why it is left alone; empty: it can be accelerated
}

// Uplink is a device of the agent's namespace.
type Uplink struct {
	Index int
	Name  string
	MTU   int
	// Group is equal for next hops of the same routes: packets leave by one, and may arrive by any of
	// them. 0: the device is alone.
	Group uint32
}

// Reason is why something is left alone.
type Reason struct {
	Word string // one of a few, for metrics
	Text string // a sentence that a user can act on
}

// Words for Reason.
const (
	External  = "external"  // a program decides about each packet
	Encrypted = "encrypted" // IPsec takes the packets
	Format    = "format"    // the header differs from what the fast path writes
	Checksum  = "checksum"
	Inherit   = "inherit" // an outer field depends on the inner packet
	Link      = "link"    // no Ethernet below
	Shaped    = "shaped"
	Filtered  = "filtered"
	Twin      = "twin"
	Elsewhere = "elsewhere" // a namespace other than the agent's routes its outer packets
	Untrusted = "untrusted" // a container may have made it
	Kind      = "kind"      // neither VXLAN nor Geneve
	Unread    = "unread"    // something could not be read
	Thread    = "thread"
	Watched   = "watched"
	XDP       = "xdp"
)

// Host is the state of a host as read.
type Host struct {
	Own      uint64          // the agent's namespace
	Spaces   []Space         // the agent's first
	Ends     []container.End // of containers
	Policies []netdev.Policy // IPsec, in the agent's namespace
	// Partly is why Policies are incomplete; nil if they are complete.
	Partly error
	Groups map[int]uint32 // of devices of the agent's namespace; see Uplink
}

// Space is a network namespace with host ends of containers, or the agent's own.
type Space struct {
	NetNS   uint64
	Path    string
	Trusted bool // it was not created by a container
	Outer   int  // the agent's namespace's id inside it; -1: none
	Links   []netdev.Link
	Tunnels []netdev.Tunnel
	Near    []netdev.Neighbour
	Ports   [2]uint16           // ip_local_port_range
	Routed  map[int]bool        // other devices with routes
	Leads   map[int][]int       // by tunnel: the devices of the agent's namespace towards its VTEPs
	State   map[int]qdisc.State // of tunnels and their bridges; in the agent's namespace also of devices that tunnels lead to
	Unread  map[int]error       // read errors by device; 0: of all
}

const mostVTEPs = 256

// Find returns the networks of a host, sorted by namespace and index. They include tunnels of other
// kinds that look like an overlay's.
func Find(h Host) []Network {
	var list []Network
	own := h.Spaces[0]
	for _, s := range h.Spaces {
		for _, t := range s.Tunnels {
			list = append(list, find(h, s, own, t))
		}
		for _, l := range s.Links {
			if r, ok := stranger(s, l); ok {
				list = append(list, Network{NetNS: s.NetNS, Path: s.Path, Index: l.Index, Name: l.Name, Kind: l.Kind, Refused: []Reason{r}})
			}
		}
	}
	twins(list)
	slices.SortFunc(list, func(a, b Network) int { return cmp.Or(cmp.Compare(a.NetNS, b.NetNS), cmp.Compare(a.Index, b.Index)) })
	return list
}

func find(h Host, s, own Space, t netdev.Tunnel) Network {
	n := Network{
		NetNS: s.NetNS, Path: s.Path, Index: t.Index, Name: t.Name, Kind: t.Kind,
		VNI: t.VNI, Port: t.Port, SourcePorts: t.Sources, InheritTOS: t.InheritTOS,
		VTEPs: s.vteps(t), MTU: t.MTU,
	}
	if n.SourcePorts[0] >= n.SourcePorts[1] { // as udp_flow_src_port does
		n.SourcePorts = s.Ports
	}
	master, _ := s.link(t.Master)
	if master.Kind == "bridge" {
		n.Bridge, n.BridgeName = master.Index, master.Name
	}
	for _, e := range h.Ends {
		if e.Host && e.NetNS == s.NetNS && (n.Bridge == 0 || e.Inside.Host.Master == n.BridgeName) {
			n.Ends = append(n.Ends, e.Device)
		}
	}
	slices.SortFunc(n.Ends, func(a, b container.Device) int { return cmp.Compare(a.Index, b.Index) })
	n.Ends = slices.Compact(n.Ends) // containers of one pod share ends

	refuse := func(word, format string, args ...any) {
		n.Refused = append(n.Refused, Reason{word, fmt.Sprintf(format, args...)})
	}
	for _, index := range s.Leads[t.Index] {
		l, ok := own.link(index)
		switch {
		case !ok || l.Name == "lo": // a VTEP of this node
			continue
		case !l.Ether:
			refuse(Link, "its packets leave by %s (%s), which has no Ethernet: use one that has for the tunnel", l.Name, l.Kind)
		default:
			n.Uplinks = append(n.Uplinks, Uplink{index, l.Name, l.MTU, h.Groups[index]})
			if who := behind(own.State[index].Ingress, ""); who != "" {
				refuse(Filtered, "%s has %s for what it receives, which packets would not meet: remove it, or attach it by tcx", l.Name, who)
			}
		}
	}
	unread := []error{h.Partly, s.Unread[0], s.Unread[t.Index], s.Unread[n.Bridge], own.Unread[0]}
	for _, u := range n.Uplinks {
		unread = append(unread, own.Unread[u.Index])
	}
	slices.SortFunc(n.Uplinks, func(a, b Uplink) int { return cmp.Compare(a.Index, b.Index) })
	n.Uplinks = slices.Compact(n.Uplinks)

	if s.NetNS != h.Own && !s.Trusted {
		refuse(Untrusted, "its namespace may have been made by a container")
	}
	if outer := -1; s.NetNS != h.Own && (s.Outer < 0 || t.PeerNS != s.Outer) || s.NetNS == h.Own && t.PeerNS != outer {
		refuse(Elsewhere, "its outer packets are routed in a namespace that is not the agent's: run an agent there")
	}
	if t.Master != 0 && n.Bridge == 0 {
		refuse(Format, "it is a port of %s, which is no bridge", cmp.Or(master.Name, "another device"))
	}
	options(t, refuse)
	if p, ok := encrypted(h.Policies, t, n); ok {
		refuse(Encrypted, "%s takes its packets: an encrypted network stays as it is, and others on the same port with it", policyText(p))
	}
	taken(s, t.Link, refuse)
	if n.Bridge != 0 {
		taken(s, master, refuse)
	}
	if err := cmp.Or(unread...); err != nil {
		refuse(Unread, "not all could be read: %v", err)
	}
	return n
}

func (s Space) link(index int) (netdev.Link, bool) {
	i := slices.IndexFunc(s.Links, func(l netdev.Link) bool { return l.Index == index })
	if index == 0 || i < 0 {
		return netdev.Link{}, false
	}
	return s.Links[i], true
}

// vteps lists the known VTEPs of other nodes.
func (s Space) vteps(t netdev.Tunnel) []netip.Addr {
	var list []netip.Addr
	add := func(a netip.Addr) {
		if a.IsValid() && !a.IsMulticast() {
			list = append(list, a)
		}
	}
	add(t.Remote)
	for _, n := range s.Near {
		if n.FDB() && n.Device == t.Index {
			add(n.VTEP)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	list = slices.Compact(list)
	return list[:min(len(list), mostVTEPs)]
}
