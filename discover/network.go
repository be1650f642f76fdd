package discover

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	maxInterfaces = 64 // of one container
	scanEvery     = time.Second
	maxMisses     = 3 // looks for a host end without success, after which only a refresh looks again
	minHold       = 20 * time.Millisecond
	maxHold       = 5 * time.Second
)

// networks holds the network namespaces of containers, each one once even if containers share it.
type networks struct {
	cfg  Config
	wake func()
	own  *netdev.NS   // the agent's
	stop func() error // ends its watch

	known   map[uint64]*network
	hosts   map[uint64][]string // a path to each namespace of host ends, by inode
	scan    map[uint64][]string // the last result of lived
	scanned time.Time
}

// network is one namespace that containers live in.
type network struct {
	interfaces []container.Interface
	many       bool             // more devices or addresses exist
	ids        map[int]location // namespaces by their ids in this one
	search     search           // for more ids, in the current look
	sought     bool             // all namespaces were listed for it
	leads      []location       // other ends of its devices: see elsewhere
	far        []far            // the state of the namespaces in leads
	examined   int              // number of the look that read far
	stop       func() error     // ends the watch; nil if there is none
	dirty      atomic.Bool
	missed     bool      // a host end was not found in the last look
	misses     int       // consecutive looks that missed one
	scanned    time.Time // time of the search in the last of those looks

	looks  int // number of looks, for containers that share the namespace
	looked time.Time
	hold   time.Duration // time after a look until events count again
}

// location is where a namespace was found.
type location struct {
	inode uint64
	path  string
}

func newNetworks(cfg Config, wake func()) (*networks, error) {
	own, err := netdev.Open(cfg.NetNS)
	if err != nil {
		return nil, err
	}
	// All that list its devices share this watch.
	stop, err := cfg.Monitor.Watch(own, netdev.Interest{}, nil)
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	return &networks{cfg: cfg, wake: wake, own: own, stop: stop, known: make(map[uint64]*network), hosts: make(map[uint64][]string)}, nil
}

func (n *networks) close() {
	n.keep(nil)
	n.stop()
	n.own.Close()
}

// keep forgets all namespaces except the used ones. A watch keeps its namespace alive, so keep must
// be called soon after the last container has ended.
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

// changed reports whether devices in a namespace may have changed since the given look, and how
// long to wait before looking. The agent looks ever less often at a container that keeps changing
// its devices.
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
		if n.scanned.After(net.scanned) {
			return 0, true // another namespace's search has looked further since
		}
		return scanEvery - n.cfg.Now().Sub(n.scanned), true
	}
	return 0, false
}

// of returns the state of the namespace of process pid; nil if it is the agent's own. With afresh
// it looks again even without an event.
func (n *networks) of(inode uint64, pid int, afresh bool) (*network, error) {
	if inode == n.own.Inode() {
		return nil, nil
	}
	net := n.known[inode]
	if net != nil && !afresh && !net.dirty.Load() && !net.missed {
		return net, nil
	}
	return n.look(net, inode, pid)
}

// look reads a new namespace (net is nil) for of, or a known one again.
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
		about := netdev.Interest{Causes: []netdev.Cause{netdev.LinkChanged, netdev.AddressChanged}}
		net.stop, err = n.cfg.Monitor.Watch(ns, about, func([]netdev.Change) {
			if !net.dirty.Swap(true) {
				n.wake()
			}
		})
		if err != nil {
			// Without a watch, only the next refresh sees changes.
			n.cfg.Log.Warn("watch network of container", "netns", inode, "err", err)
		}
		n.known[inode] = net
	}
	now := n.cfg.Now()
	net.hold = backoff.Again(net.hold, minHold, maxHold, now.Sub(net.looked), 2*net.hold)
	net.looked = now
	net.missed = false
	net.dirty.Store(false) // before the look, so that changes during the look count

	links, err := n.cfg.Monitor.Links(ns, n.cfg.Links)
	many := errors.Is(err, netdev.ErrMany)
	if err != nil && !many {
		net.dirty.Store(true)
		return nil, err
	}
	net.looks++
	net.search = search{}
	if many {
		links = n.fromOutside(ns, links)
	}
	links = slices.DeleteFunc(slices.Clone(links), func(l netdev.Link) bool { return l.Name == "lo" })
	if many = many || len(links) > maxInterfaces; many {
		// Keep the devices that lead out of the namespace. A container may make any number of
		// others.
		n.nearest(net, ns, links)
	}
	if many && !net.many {
		n.cfg.Log.Warn("container has too many network devices or addresses", "netns", inode, "taken", min(len(links), maxInterfaces))
	}
	net.many = many
	var list []container.Interface
	for _, l := range links[:min(len(links), maxInterfaces)] {
		list = append(list, container.Interface{
			Name: l.Name, Index: l.Index, Kind: l.Kind, MAC: l.MAC, Addrs: slices.Sorted(slices.Values(l.Addrs)),
			Host: n.hostEnd(net, ns, l), Apart: l.PeerNS >= 0 && l.Kind != "veth",
		})
	}
	if net.missed {
		net.misses++
		net.scanned = n.scanned
	}
	net.interfaces, net.leads = list, n.leads(net, ns, links)
	return net, nil
}
