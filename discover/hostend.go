package discover

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// search maps the namespace ids of one namespace to namespaces. The kernel answers only the reverse
// question, so search tries candidates, the likely ones first, and each once for all ids.
type search struct {
	tried map[uint64]bool
	stage int // of candidates
}

// hostEnd finds the other end of a veth or netkit. It returns zero for other kinds, and if the
// other end cannot be reached.
func (n *networks) hostEnd(net *network, ns *netdev.NS, l netdev.Link) container.HostEnd {
	if !twoEnded(l) || l.Peer == 0 || l.PeerNS < 0 {
		return container.HostEnd{} // an end in its own namespace is no host end
	}
	there, path := n.resolve(net, ns, l.PeerNS)
	if there == nil {
		net.missed = true
		return container.HostEnd{}
	}
	if there != n.own {
		defer there.Close()
	}
	end := container.HostEnd{NetNS: there.Inode(), NSPath: path, Index: l.Peer, Trusted: there == n.own || !n.found(path)}
	peer, err := there.Link(l.Peer)
	if err != nil {
		return container.HostEnd{} // it is being removed
	}
	end.Name = peer.Name
	if peer.Master != 0 {
		if master, err := there.Link(peer.Master); err == nil {
			end.Master = master.Name
		}
	}
	return end
}

func twoEnded(l netdev.Link) bool { return l.Kind == "veth" || l.Kind == "netkit" }

// nearest sorts the devices of a namespace by where their other end or lower device is: first the
// agent's own namespace; then one mounted where the agent sees it, as runtimes do; then any other
// that can be found; then the rest. A container can make devices that lead to namespaces of its own
// children, but none that lead to the first two.
func (n *networks) nearest(net *network, ns *netdev.NS, links []netdev.Link) {
	const own, mounted, found, none = 0, 1, 2, 3
	far := make(map[int]int) // by namespace id
	of := func(l netdev.Link) int {
		if l.Peer == 0 || l.PeerNS < 0 {
			return none
		}
		if d, ok := far[l.PeerNS]; ok {
			return d
		}
		d := none
		if there, path := n.resolve(net, ns, l.PeerNS); there == n.own {
			d = own
		} else if there != nil {
			there.Close()
			d = mounted
			if n.found(path) {
				d = found
			}
		}
		far[l.PeerNS] = d
		return d
	}
	slices.SortStableFunc(links, func(x, y netdev.Link) int { return cmp.Compare(of(x), of(y)) })
}

// found reports whether the path to a namespace leads through a process.
func (n *networks) found(path string) bool {
	return strings.HasPrefix(path, filepath.Clean(n.cfg.Proc)+"/")
}

// fromOutside completes an incomplete listing of a namespace: it adds the devices that the host's
// ends lead to.
func (n *networks) fromOutside(ns *netdev.NS, links []netdev.Link) []netdev.Link {
	seen := make(map[int]bool)
	for _, l := range links {
		seen[l.Index] = true
	}
	from := func(there *netdev.NS) {
		id, err := there.ID(ns)
		if err != nil || id < 0 {
			return
		}
		ends, err := n.cfg.Monitor.Links(there, netdev.MostLinks)
		if err != nil {
			n.cfg.Log.Warn("look for host ends", "netns", there.Inode(), "err", err)
		}
		for _, end := range ends {
			if !twoEnded(end) || end.PeerNS != id || seen[end.Peer] {
				continue
			}
			if l, err := ns.Link(end.Peer); err == nil {
				seen[l.Index] = true
				links = append(links, l)
			}
		}
	}
	from(n.own)
	for inode, paths := range netdev.Mounted(n.cfg.Proc, "self") {
		if inode == n.own.Inode() || inode == ns.Inode() {
			continue
		}
		if there, _ := openAt(inode, paths...); there != nil {
			from(there)
			there.Close()
		}
	}
	return links
}

// resolve opens the namespace with an id of ns; nil if it cannot be found. The caller closes the
// result unless it is n.own.
func (n *networks) resolve(net *network, ns *netdev.NS, id int) (*netdev.NS, string) {
	for {
		if at, ok := net.ids[id]; ok {
			if at.inode == n.own.Inode() {
				return n.own, at.path
			}
			if there, path := openAt(at.inode, at.path); there != nil {
				return there, path
			}
			delete(net.ids, id)
		}
		if !n.searchOn(net, ns) {
			// The namespace may be newer than the scan, or have neither a name nor a process.
			return nil, ""
		}
	}
}

// searchOn tries the next stage of candidates, and reports whether there was one.
func (n *networks) searchOn(net *network, ns *netdev.NS) bool {
	s := &net.search
	if s.tried == nil {
		s.tried = map[uint64]bool{ns.Inode(): true}
	}
	var candidates map[uint64][]string
	switch s.stage {
	case 0:
		candidates = map[uint64][]string{n.own.Inode(): {n.cfg.NetNS}}
	case 1:
		candidates = n.hosts
	case 2:
		n.hosts = make(map[uint64][]string) // namespaces in use come back
		candidates = netdev.Mounted(n.cfg.Proc, "self")
	case 3:
		candidates = n.lived(net)
	default:
		return false
	}
	s.stage++
	for inode, paths := range candidates {
		if s.tried[inode] {
			continue
		}
		there, path := n.own, n.cfg.NetNS
		if inode != n.own.Inode() {
			if there, path = openAt(inode, paths...); there == nil {
				continue // a later stage may know another path
			}
		}
		s.tried[inode] = true
		if id, err := ns.ID(there); err == nil && id >= 0 {
			net.ids[id] = location{inode, path}
			if there != n.own {
				n.hosts[inode] = []string{path}
			}
		}
		if there != n.own {
			there.Close()
		}
	}
	return true
}

// lived returns [netdev.All]. That takes long, so it is repeated once a second at most, and once
// for each new namespace: the first container of an overlay network on this host brings the
// namespace that it leads to.
func (n *networks) lived(net *network) map[uint64][]string {
	if now := n.cfg.Now(); n.scan == nil || now.Sub(n.scanned) >= scanEvery || !net.sought {
		n.scanned, n.scan, net.sought = now, netdev.All(n.cfg.Proc), true
	}
	return n.scan
}

// openAt opens a namespace by the first of the paths that leads to it now, and returns that path,
// or nil if none does.
func openAt(inode uint64, paths ...string) (*netdev.NS, string) {
	for _, path := range paths {
		ns, err := netdev.Open(path)
		if err != nil {
			continue
		}
		if ns.Inode() == inode {
			return ns, path
		}
		ns.Close()
	}
	return nil, ""
}
