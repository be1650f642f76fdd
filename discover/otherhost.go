package discover

import (
	"net/netip"
	"slices"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// The cgroup tree holds the cgroups of all hosts on this machine: of a node that is a network
// namespace, with its pods, and of an engine inside a container. The agent of that node or
// container lists those; this one does not.
//
// A bare cgroup is another host's if devices of its network namespace lead to other namespaces (a
// veth or netkit to its peer, a macvlan, ipvlan or VLAN to the device below it, a tunnel to where
// it sends), and none of those namespaces is this host's. A namespace is this host's if
//   - it is the agent's own, or
//   - a device of it leads to the agent's own, as the VXLAN of a Docker overlay does,
//     unless a runtime has a container in it: what hangs on that is inside the
//     container, or
//   - it has hardware or a TUN device, of which nobody can tell where they lead
//     (rootless engines reach the host by a TUN), or
//   - it was not found, or has more devices than are examined: the doubt counts for
//     the cgroup.
//
// The namespace that the agent's default route leads to is never this host's. It is the underlay of
// nodes that are namespaces, or the host around a node that is a container. What is attached to it
// is beside this host, such as another node with its pods in the host network.
//
// So a cgroup without such devices (host network, none, a tap) is always this host's. The search
// covers one namespace between a cgroup and the agent's own, and not two.

// far is the state of a namespace that devices of another one lead to.
type far struct {
	inode   uint64 // 0: not found
	home    bool   // a device of it leads to the agent's own namespace
	doubt   bool   // where one of its devices leads is unknown
	outside bool   // the agent's default route leads there
}

// elsewhere reports whether a namespace belongs to another host, given where its devices lead and
// which namespaces have containers of runtimes.
func elsewhere(leads []far, inhabited map[uint64]bool) bool {
	ours := func(f far) bool {
		if f.outside || inhabited[f.inode] {
			return false
		}
		return f.inode == 0 || f.home || f.doubt
	}
	return len(leads) > 0 && !slices.ContainsFunc(leads, ours)
}

// elsewhere reports whether the namespace of a bare cgroup belongs to another host. It examines the
// namespaces around it once per look.
func (n *networks) elsewhere(inode uint64, inhabited map[uint64]bool) bool {
	net := n.known[inode]
	if net == nil {
		return false // the agent's own
	}
	if net.examined != net.looks {
		net.examined, net.far = net.looks, n.examine(net.leads)
	}
	return elsewhere(net.far, inhabited)
}

// leads returns where a namespace's devices lead; nil if one leads to the agent's own namespace. An
// unknown end is empty.
func (n *networks) leads(net *network, ns *netdev.NS, links []netdev.Link) []location {
	var list []location
	seen := make(map[int]bool) // by the id of the namespace
	for _, l := range links {
		if l.PeerNS < 0 || seen[l.PeerNS] {
			continue
		}
		seen[l.PeerNS] = true
		there, path := n.resolve(net, ns, l.PeerNS)
		switch {
		case there == nil:
			list = append(list, location{})
		case there == n.own:
			return nil
		default:
			list = append(list, location{there.Inode(), path})
			there.Close()
		}
	}
	return list
}

// examine examines namespaces: together as many devices as a look at one of them.
func (n *networks) examine(at []location) []far {
	var list []far
	left := n.cfg.Links
	outside := n.outside()
	for _, a := range at {
		there, _ := openAt(a.inode, a.path)
		if there == nil {
			list = append(list, far{})
			continue
		}
		links, err := n.cfg.Monitor.Links(there, left)
		left -= len(links)
		// Listing the devices assigns ids to their namespaces, so it comes first.
		id, idErr := there.ID(n.own)
		seen, seenErr := n.own.ID(there)
		there.Close()
		f := far{inode: a.inode, doubt: err != nil || idErr != nil, outside: seenErr == nil && slices.Contains(outside, seen)}
		for _, l := range links {
			f.home = f.home || id >= 0 && l.PeerNS == id
			f.doubt = f.doubt || l.Kind == "tuntap" || l.Kind == "device" && l.Name != "lo"
		}
		list = append(list, f)
	}
	return list
}

// outside returns the ids of the namespaces that the default routes of the agent's namespace lead to.
func (n *networks) outside() (ids []int) {
	// No host has these addresses (RFC 5737, RFC 3849), so only a default route leads to them.
	for _, nowhere := range []string{"192.0.2.1", "2001:db8::1"} {
		by, err := n.own.RouteTo(netip.MustParseAddr(nowhere), netip.Addr{}, 0)
		if err != nil {
			continue
		}
		if l, err := n.own.Link(by[0]); err == nil && l.PeerNS >= 0 {
			ids = append(ids, l.PeerNS)
		}
	}
	return ids
}
