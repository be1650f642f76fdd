package netdev

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// Change is a change in a network namespace.
type Change struct {
	Cause  Cause
	Device int // index; 0 if the kernel reports none, or several
}

// Cause names what has changed.
type Cause string

// The causes.
const (
	LinkChanged      Cause = "link"
	AddressChanged   Cause = "address"
	RouteChanged     Cause = "route"     // a default one, or one to a tunnel; or a rule, or a nexthop
	NeighbourChanged Cause = "neighbour" // entry with another link-layer address, or removed
	FDBChanged       Cause = "fdb"       // entry with another port or VTEP, or removed
	QdiscChanged     Cause = "qdisc"     // or a class; the kernel also reports mere queries
	FilterChanged    Cause = "tc"        // another qdisc, or a filter; the kernel does not report tcx
	NFTChanged       Cause = "nftables"  // without the changes of iptables-legacy and ebtables-legacy
	PolicyChanged    Cause = "xfrm"
	Overrun          Cause = "overrun" // messages were lost: anything may have changed
	Gone             Cause = "gone"    // the path no longer leads to the namespace, and the watch has ended
)

// feed is what one socket receives.
type feed int

const (
	devices feed = iota // also keeps the list of devices up to date
	tc
	near
	routes
	nft
	xfrm
)

// feeds are multicast groups of a netlink family. Older kernels lack the optional one (0: none).
var feeds = map[feed]struct {
	family   int
	groups   []int
	optional int
}{
	devices: {unix.NETLINK_ROUTE, []int{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}, unix.RTNLGRP_BRVLAN},
	tc:      {unix.NETLINK_ROUTE, []int{unix.RTNLGRP_TC}, 0},
	near:    {unix.NETLINK_ROUTE, []int{unix.RTNLGRP_NEIGH}, 0},
	routes:  {unix.NETLINK_ROUTE, []int{unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE}, unix.RTNLGRP_NEXTHOP},
	nft:     {unix.NETLINK_NETFILTER, []int{unix.NFNLGRP_NFTABLES}, 0},
	xfrm:    {unix.NETLINK_XFRM, []int{4}, 0}, // XFRMNLGRP_POLICY
}

// feedOf are the feeds of the causes that a watch can be interested in.
var feedOf = map[Cause]feed{
	LinkChanged: devices, AddressChanged: devices, RouteChanged: routes, NeighbourChanged: near, FDBChanged: near,
	QdiscChanged: tc, FilterChanged: tc, NFTChanged: nft, PolicyChanged: xfrm,
}

// Concern reports whether any of the changes may concern the device with an index.
func Concern(changes []Change, device int) bool {
	return slices.ContainsFunc(changes, func(c Change) bool { return c.Device == device || c.Cause == Overrun })
}

// hear handles one message of rtnetlink.
func (s *space) hear(m syscall.NetlinkMessage) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		s.devices.hear(m)
		if l, err := parseLink(m.Data); err == nil && l.carries() {
			s.narrow() // before the watches are told and read the routes
		}
		s.tell(LinkChanged, aboutDevice(m.Data))
	case unix.RTM_NEWVLAN, unix.RTM_DELVLAN:
		s.tell(LinkChanged, aboutDevice(m.Data))
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		s.devices.hear(m)
		s.tell(AddressChanged, aboutDevice(m.Data))
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, _, _ := parseRoute(m.Data)
		s.tell(RouteChanged, r.Device)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP, unix.RTM_NEWNEXTHOPBUCKET, unix.RTM_DELNEXTHOPBUCKET:
		s.tell(RouteChanged, 0)
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC:
		s.tell(QdiscChanged, aboutDevice(m.Data))
		if s.qdiscs.hear(m) {
			s.tell(FilterChanged, aboutDevice(m.Data))
		}
	case unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS:
		s.tell(QdiscChanged, aboutDevice(m.Data))
	case unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER, unix.RTM_NEWCHAIN, unix.RTM_DELCHAIN:
		s.tell(FilterChanged, aboutDevice(m.Data))
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		n, ok, err := parseNeighbour(m.Data)
		if err != nil || !ok || s.known.now == nil || !s.known.hear(n, m.Header.Type == unix.RTM_DELNEIGH) {
			return
		}
		if n.FDB() {
			s.tell(FDBChanged, n.Device)
			return
		}
		s.tell(NeighbourChanged, n.Device)
	}
}

// aboutDevice reads the index of the device, which struct ifinfomsg, ifaddrmsg, tcmsg, ndmsg and
// br_vlan_msg have at the same offset.
func aboutDevice(data []byte) int { return int(int32(binary.NativeEndian.Uint32(data[4:]))) }

// qdiscs holds the last message about each qdisc: struct tcmsg, and the kind. The kernel also
// notifies all listeners of a qdisc when a process only queries it.
type qdiscs map[[2]uint32]string

// mostQdiscs bounds qdiscs. Beyond that, each message counts as a change.
const mostQdiscs = 4096

// hear takes a message, and reports whether the device's qdisc has changed. The first message about
// a qdisc may be a change.
func (q *qdiscs) hear(m syscall.NetlinkMessage) bool {
	const size = 20 // of struct tcmsg: family, index, handle, parent, info
	if len(m.Data) < size {
		return true
	}
	key := [2]uint32{binary.NativeEndian.Uint32(m.Data[4:]), binary.NativeEndian.Uint32(m.Data[12:])}
	if m.Header.Type == unix.RTM_DELQDISC {
		delete(*q, key)
		return true
	}
	what := string(m.Data[8:12])
	if eachAt(m.Data[size:], func(kind []byte) { what += unix.ByteSliceToString(kind) }, unix.TCA_KIND) != nil {
		return true
	}
	if (*q)[key] == what {
		return false
	}
	if *q == nil {
		*q = make(qdiscs)
	}
	if len(*q) < mostQdiscs {
		(*q)[key] = what
	}
	return true
}

// reaches is the known state of neighbours and FDBs. One goroutine uses it at a time.
type reaches struct {
	now  map[NeighbourKey]Reach
	ever map[whose]bool // addresses, on any device
	full bool           // too many to keep: an unknown entry may have existed
}

// whose is the address of an entry.
type whose struct {
	addr netip.Addr
	mac  string
}

func (r *reaches) read(ns *NS) error {
	r.now, r.full = make(map[NeighbourKey]Reach), false
	if r.ever == nil {
		r.ever = make(map[whose]bool)
	}
	list, err := ns.Neighbours(MostNeighbours)
	if err != nil && !errors.Is(err, ErrMany) {
		return err
	}
	for _, n := range list {
		r.hear(n, false)
	}
	r.full = r.full || err != nil
	return nil
}

// lost handles lost messages.
func (r *reaches) lost(ns *NS) {
	if r.read(ns) != nil {
		r.full = true
	}
}

// hear takes a message about an entry, and reports whether the entry has changed.
func (r *reaches) hear(n Neighbour, gone bool) bool {
	was, known := r.now[n.NeighbourKey]
	if gone || n.Reach == (Reach{}) {
		delete(r.now, n.NeighbourKey)
		return known || r.full && gone
	}
	if known {
		r.now[n.NeighbourKey] = n.Reach
		return was != n.Reach
	}
	who := whose{n.Addr, n.MAC}
	tell := r.ever[who] || r.full
	if len(r.ever) >= MostNeighbours && !r.ever[who] {
		clear(r.ever) // of entries that have long gone
		for key := range r.now {
			r.ever[whose{key.Addr, key.MAC}] = true
		}
	}
	if len(r.now) >= MostNeighbours {
		r.full = true
		return tell
	}
	r.now[n.NeighbourKey], r.ever[who] = n.Reach, true
	return tell
}
