package container

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	maxInterfaces = 64 // of one container
	scanEvery     = time.Second
	maxMisses     = 3 // looks for a host end, until only the refresh looks again
	minHold       = 20 * time.Millisecond
	maxHold       = 5 * time.Second
)

// networks knows the network namespaces of the containers, each once however
// many containers share it.
type networks struct {
	cfg  Config
	wake func()
	own  *netdev.NS // the agent's

	known   map[uint64]*network
	hosts   map[uint64]string // namespaces in which host ends were found, by inode
	scan    map[uint64]string // the last result of lived
	scanned time.Time
}

// network is one namespace that containers live in.
type network struct {
	interfaces []Interface
	ids        map[int]location // namespaces by the ids that this one has for them
	stop       func() error     // ends the watch; nil if there is none
	dirty      atomic.Bool
	missed     bool // a host end was not found in the last look
	misses     int  // such looks

	looks  int // numbers the looks, for containers that share the namespace
	looked time.Time
	hold   time.Duration // how long after looked until events count again
}

// location is where a namespace was found.
type location struct {
	inode uint64
	path  string
}

func newNetworks(cfg Config, wake func()) (*networks, error) {
	own, err := netdev.Open(filepath.Join(cfg.Proc, "self", "ns", "net"))
	if err != nil {
		return nil, err
	}
	return &networks{cfg: cfg, wake: wake, own: own, known: make(map[uint64]*network), hosts: make(map[uint64]string)}, nil
}

func (n *networks) close() {
	n.keep(nil)
	n.own.Close()
}

// keep forgets all namespaces but the used ones. A watch holds its namespace
// alive, so this must follow the end of the last container soon.
func (n *networks) keep(used map[uint64]bool) {
	for inode, net := range n.known {
		if !used[inode] {
			if net.stop != nil {
				net.stop()
			}
			delete(n.known, inode)
		}
	}
}

// changed says whether devices in a namespace may have changed since the given
// look at it, and how long to wait before looking: a container that changes
// its devices all the time is looked at ever less often.
func (n *networks) changed(inode uint64, look int) (time.Duration, bool) {
	net := n.known[inode]
	switch {
	case net == nil:
		return 0, false
	case net.looks != look:
		return 0, true
	case net.dirty.Load():
		return net.hold - n.cfg.Now().Sub(net.looked), true
	case net.missed && net.misses < maxMisses:
		return scanEvery - n.cfg.Now().Sub(net.looked), true
	}
	return 0, false
}

// interfaces returns the devices of a namespace, which is that of process pid,
// and the number of the look that found them. With afresh it looks even if
// there was no event.
func (n *networks) interfaces(inode uint64, pid int, afresh bool) ([]Interface, int, error) {
	if inode == n.own.Inode() {
		return nil, 0, nil
	}
	net := n.known[inode]
	if net != nil && !afresh && !net.dirty.Load() && !net.missed {
		return net.interfaces, net.looks, nil
	}
	net, err := n.look(net, inode, pid)
	if err != nil {
		return nil, 0, err
	}
	return net.interfaces, net.looks, nil
}

// look is interfaces, for a namespace that is new (net is nil) or to be looked
// at again.
func (n *networks) look(net *network, inode uint64, pid int) (*network, error) {
	ns, err := netdev.Open(filepath.Join(n.cfg.Proc, strconv.Itoa(pid), "ns", "net"))
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if ns.Inode() != inode {
		return nil, fmt.Errorf("process %d has left its network namespace", pid)
	}
	if net == nil {
		net = &network{hold: minHold, ids: make(map[int]location)}
		net.stop, err = ns.Watch(func() {
			if !net.dirty.Swap(true) {
				n.wake()
			}
		})
		if err != nil {
			// Without it changes are seen at the next refresh only.
			n.cfg.Log.Warn("watch network of container", "netns", inode, "err", err)
		}
		n.known[inode] = net
	}
	now := n.cfg.Now()
	if now.Sub(net.looked) < 2*net.hold {
		net.hold = min(2*net.hold, maxHold)
	} else {
		net.hold = minHold
	}
	net.looked = now
	net.missed = false
	net.dirty.Store(false) // before the look: what comes during it counts

	links, err := ns.Links()
	if err != nil {
		net.dirty.Store(true)
		return nil, err
	}
	net.looks++
	var list []Interface
	for _, l := range links {
		if l.Name == "lo" {
			continue
		}
		if len(list) == maxInterfaces {
			n.cfg.Log.Warn("container has too many network devices", "netns", inode, "devices", len(links), "taken", maxInterfaces)
			break
		}
		list = append(list, Interface{
			Name: l.Name, Index: l.Index, Kind: l.Kind, MAC: l.MAC, Addrs: slices.Sorted(slices.Values(l.Addrs)),
			Host: n.hostEnd(net, ns, l),
		})
	}
	if net.missed {
		net.misses++
	}
	net.interfaces = list
	return net, nil
}

// hostEnd finds the other end of a veth or netkit. It is zero for all other
// kinds, and where the other end cannot be reached.
func (n *networks) hostEnd(net *network, ns *netdev.NS, l netdev.Link) HostEnd {
	if l.Kind != "veth" && l.Kind != "netkit" || l.Peer == 0 || l.PeerNS < 0 {
		return HostEnd{} // an end in its own namespace is no host end
	}
	there, path := n.resolve(net, ns, l.PeerNS)
	if there == nil {
		return HostEnd{}
	}
	if there != n.own {
		defer there.Close()
	}
	end := HostEnd{NetNS: there.Inode(), NSPath: path, Index: l.Peer}
	peer, err := there.Link(l.Peer)
	if err != nil {
		return HostEnd{} // it is being removed
	}
	end.Name = peer.Name
	if peer.Master != 0 {
		if master, err := there.Link(peer.Master); err == nil {
			end.Master = master.Name
		}
	}
	return end
}

// resolve opens the namespace that ns knows by an id; nil if none is found.
// The kernel answers only the reverse question, so candidates are tried, the
// likely ones first. Unless it is n.own the caller closes the result.
func (n *networks) resolve(net *network, ns *netdev.NS, id int) (*netdev.NS, string) {
	ownPath := filepath.Join(n.cfg.Proc, "self", "ns", "net")
	if at, ok := net.ids[id]; ok {
		if at.inode == n.own.Inode() {
			return n.own, ownPath
		}
		if there := openAt(at.path, at.inode); there != nil {
			return there, at.path
		}
		delete(net.ids, id)
	}
	if got, err := ns.ID(n.own); err == nil && got == id {
		net.ids[id] = location{n.own.Inode(), ownPath}
		return n.own, ownPath
	}

	tried := map[uint64]bool{n.own.Inode(): true, ns.Inode(): true}
	try := func(inode uint64, path string) *netdev.NS {
		if tried[inode] {
			return nil
		}
		tried[inode] = true
		there := openAt(path, inode)
		if there == nil {
			return nil
		}
		if got, err := ns.ID(there); err != nil || got != id {
			there.Close()
			return nil
		}
		net.ids[id] = location{inode, path}
		n.hosts[inode] = path
		return there
	}
	for inode, path := range n.hosts {
		if there := try(inode, path); there != nil {
			return there, path
		}
	}
	clear(n.hosts) // what is still of use comes back
	for inode, path := range netdev.Mounted(n.cfg.Proc, "self") {
		if there := try(inode, path); there != nil {
			return there, path
		}
	}
	for inode, path := range n.lived() {
		if there := try(inode, path); there != nil {
			return there, path
		}
	}
	// It may have been too young for the scan, or have neither name nor process.
	net.missed = true
	return nil, ""
}

// lived returns [netdev.All], which is a long look, so that it is not made more
// often than each second.
func (n *networks) lived() map[uint64]string {
	if now := n.cfg.Now(); n.scan == nil || now.Sub(n.scanned) >= scanEvery {
		n.scanned, n.scan = now, netdev.All(n.cfg.Proc)
	}
	return n.scan
}

// openAt opens a namespace if it is still the one that was found there.
func openAt(path string, inode uint64) *netdev.NS {
	ns, err := netdev.Open(path)
	if err != nil {
		return nil
	}
	if ns.Inode() != inode {
		ns.Close()
		return nil
	}
	return ns
}
