package network

import (
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

const (
	mostPolicies = 4096
	mostRoutes   = 4096 // to one device
)

// Reader reads the input of Find.
type Reader struct {
	Own  *netdev.NS // the agent's namespace
	Path string     // of that namespace
	Find *netdev.Finder
	Look func(at container.Device, path string) (qdisc.State, error) // hook.Ends.Look
	Home func(netns uint64) bool                                     // a container lives in that namespace
	// Monitor lists devices; it may be nil.
	Monitor *netdev.Monitor
}

// Read reads the agent's namespace, and the namespaces with host ends of containers, unless a container
// may have created them. It omits what has just gone. After an error, nothing can be decided.
func (r Reader) Read(list []container.End) (Host, error) {
	h := Host{Own: r.Own.Inode(), Ends: list}
	h.Policies, h.Partly = r.Own.Policies(mostPolicies)
	ways := make(map[way][]int)
	own, err := r.space(r.Own, r.Path, ways)
	if err != nil {
		return Host{}, err
	}
	h.Spaces = append(h.Spaces, own)
	seen := map[uint64]bool{h.Own: true}
	for _, e := range list {
		if !e.Host || !e.Trusted || seen[e.NetNS] || r.Home(e.NetNS) {
			continue
		}
		seen[e.NetNS] = true
		ns, err := r.Find.Open(e.Path, e.NetNS)
		if errors.Is(err, netdev.ErrNoNS) {
			continue
		}
		if err != nil {
			return Host{}, err
		}
		s, err := r.space(ns, e.Path, ways)
		ns.Close()
		if err != nil {
			return Host{}, err
		}
		h.Spaces = append(h.Spaces, s)
	}
	h.Groups = groups(ways)
	// The state of all devices that tunnels lead to.
	for _, s := range h.Spaces {
		for _, leads := range s.Leads {
			for _, index := range leads {
				r.look(&h.Spaces[0], index)
			}
		}
	}
	return h, nil
}

// groups numbers the sets of next hops. A device that is also in another set, or alone on a route, has
// no group.
func groups(ways map[way][]int) map[int]uint32 {
	of := make(map[int]uint32)
	for _, hops := range ways {
		number := uint32(0)
		if len(hops) > 1 {
			number = crc32.ChecksumIEEE(fmt.Append(nil, hops))
		}
		for _, index := range hops {
			if was, known := of[index]; known && was != number {
				number = 0
			}
			of[index] = number
		}
	}
	return of
}

// way is a route lookup for packets of a tunnel.
type way struct {
	to, from netip.Addr
	by       int
}

func (r Reader) space(ns *netdev.NS, path string, ways map[way][]int) (s Space, err error) {
	s = Space{
		NetNS: ns.Inode(), Path: path, Trusted: true, Outer: -1, Unread: make(map[int]error),
		Routed: make(map[int]bool), Leads: make(map[int][]int), State: make(map[int]qdisc.State),
	}
	// An incomplete list is still used.
	all := func(err error) error {
		if errors.Is(err, netdev.ErrMany) {
			s.Unread[0] = err
			return nil
		}
		return err
	}
	if s.Links, err = r.Monitor.Links(ns, netdev.MostLinks); all(err) != nil {
		return s, err
	}
	if err != nil || slices.ContainsFunc(s.Links, netdev.Link.IsTunnel) {
		if s.Tunnels, err = ns.Tunnels(netdev.MostLinks); all(err) != nil {
			return s, err
		}
	}
	for _, l := range s.Links {
		if _, ok := stranger(Space{Routed: map[int]bool{l.Index: true}}, l); ok {
			routes, err := ns.Routes(l.Index, mostRoutes)
			if all(err) != nil {
				return s, err
			}
			s.Routed[l.Index] = slices.ContainsFunc(routes, func(r netdev.Route) bool { // ignoring routes that every device has
				return !r.To.Addr().IsLinkLocalUnicast() && !r.To.Addr().IsMulticast()
			})
		}
	}
	if len(s.Tunnels) == 0 {
		return s, nil
	}
	if s.Near, err = ns.Neighbours(netdev.MostNeighbours); all(err) != nil {
		return s, err
	}
	if s.Ports, err = ns.LocalPorts(); err != nil {
		return s, err
	}
	if s.NetNS != r.Own.Inode() {
		if s.Outer, err = ns.ID(r.Own); err != nil {
			return s, err
		}
	}
	for _, t := range s.Tunnels {
		s.Leads[t.Index] = r.leads(s, t, ways)
		r.look(&s, t.Index)
		if t.Master != 0 {
			r.look(&s, t.Master)
		}
	}
	return s, nil
}

// leads lists the devices of the agent's namespace that a tunnel's packets leave by.
func (r Reader) leads(s Space, t netdev.Tunnel, ways map[way][]int) (list []int) {
	to := s.vteps(t)
	if t.Remote.IsMulticast() {
		to = append(to, t.Remote)
	}
	for _, a := range to {
		w := way{a, t.Local, t.Below}
		by, known := ways[w]
		if !known {
			// Without a route, the tunnel cannot send there either.
			by, _ = r.Own.RouteTo(a, t.Local, t.Below)
			slices.Sort(by)
			ways[w] = by
		}
		list = append(list, by...)
	}
	if t.Below != 0 {
		list = append(list, t.Below)
	}
	if len(list) == 0 && t.Local.IsValid() {
		links, _ := r.Monitor.Links(r.Own, netdev.MostLinks)
		for _, l := range links {
			if slices.ContainsFunc(l.Addrs, func(prefix string) bool { return strings.HasPrefix(prefix, t.Local.String()+"/") }) {
				list = append(list, l.Index)
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// look reads the state of a device.
func (r Reader) look(s *Space, index int) {
	if _, known := s.State[index]; known {
		return
	}
	state, err := r.Look(container.Device{NetNS: s.NetNS, Index: index}, s.Path)
	if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoNS) {
		s.Unread[index] = err
	}
	s.State[index] = state
}

// End reads the input of Way for an end of a container, except what other features want. inside is the
// container's namespace. Errors: journal.ErrGone, netdev.ErrNoLink or netdev.ErrNoNS if it has gone.
func (r Reader) End(e container.End, inside *netdev.NS) (state EndState, err error) {
	state = EndState{Kind: e.Inside.Kind, Trusted: e.Host && e.Trusted && !r.Home(e.NetNS)}
	l, err := inside.Link(e.Inside.Index)
	if err != nil || !state.Trusted {
		return state, err
	}
	state.Ether = l.Ether
	if state.Threaded, err = inside.InThreads(l.Index); err != nil {
		return state, err
	}
	if state.XDP, err = inside.XDP(l.Index); err != nil {
		return state, err
	}
	if state.Host, err = r.Look(e.Device, e.Path); err != nil {
		return state, err
	}
	ns, err := r.Find.Open(e.Path, e.NetNS)
	if err != nil {
		return state, err
	}
	defer ns.Close()
	host, err := ns.Link(e.Index)
	if err != nil {
		return state, err
	}
	state.MTU = min(l.MTU, host.MTU)
	if state.Bridge = host.Master; host.Master != 0 {
		var bridge netdev.Link
		if bridge, err = ns.Link(host.Master); err != nil {
			return state, err
		}
		state.MTU = min(state.MTU, bridge.MTU)
		state.Master, err = r.Look(container.Device{NetNS: e.NetNS, Index: host.Master}, e.Path)
	}
	return state, err
}
