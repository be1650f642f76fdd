package netdev

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Change is something that may make packets go another way.
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
	RouteChanged     Cause = "route"     // or a rule, or a nexthop
	NeighbourChanged Cause = "neighbour" // another link layer address, or none any more
	FDBChanged       Cause = "fdb"       // another port or VTEP, or none any more
	FilterChanged    Cause = "tc"        // a qdisc or a filter; the kernel does not report tcx
	NFTChanged       Cause = "nftables"  // not what iptables-legacy and ebtables-legacy do
	PolicyChanged    Cause = "xfrm"
	Overrun          Cause = "overrun" // messages were lost: anything may have changed
	Gone             Cause = "gone"    // the path no longer leads to the namespace, and the watch has ended
)

// mostChanges limits the changes that one call reports.
const mostChanges = 64

// WatchPaths calls changed whenever something may have changed that affects the path of packets
// through the namespace, until stop is called or the namespace has gone. Calls come from its own
// goroutines, one at a time; one may still be under way when stop returns.
//
// It reports neighbours and FDBs only if an entry has another address, port or VTEP, has gone, or
// has come for an address seen before. A neighbour that is probed again, or is new, is no change.
//
// The watch keeps the namespace alive. It ends about a second after path has ceased to lead to the
// namespace, or never if path is "".
func (ns *NS) WatchPaths(path string, changed func([]Change)) (stop func() error, err error) {
	w := &pathsWatch{path: path, changed: changed}
	if w.ns, err = ns.Dup(); err != nil {
		return nil, err
	}
	var starts []func()
	for _, s := range []struct {
		family   int
		groups   []int
		optional []int // missing in older kernels
		follow   func(*os.File, syscall.RawConn)
	}{
		{unix.NETLINK_ROUTE, append(deviceGroups, unix.RTNLGRP_TC, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE),
			[]int{unix.RTNLGRP_NEXTHOP, unix.RTNLGRP_BRVLAN}, w.rtnetlink},
		{unix.NETLINK_NETFILTER, []int{unix.NFNLGRP_NFTABLES}, nil, w.plain(NFTChanged)},
		{unix.NETLINK_XFRM, []int{xfrmGroupPolicy}, nil, w.plain(PolicyChanged)},
	} {
		f, conn, err := ns.listen(s.family, s.groups...)
		if s.family != unix.NETLINK_ROUTE && errors.Is(err, unix.EPROTONOSUPPORT) {
			continue // the kernel has no such thing that could change
		}
		if err != nil {
			return nil, errors.Join(err, w.stop())
		}
		w.files = append(w.files, f)
		if err := conn.Control(func(fd uintptr) {
			for _, group := range s.optional {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
			}
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, watchBuffer)
		}); err != nil {
			return nil, errors.Join(err, w.stop())
		}
		starts = append(starts, func() { s.follow(f, conn) })
	}
	// After the sockets, so that no change is missed.
	if err := w.known.read(w.ns); err != nil {
		return nil, errors.Join(err, w.stop())
	}
	for _, start := range starts {
		go start()
	}
	return w.stop, nil
}

const (
	xfrmGroupPolicy = 4       // XFRMNLGRP_POLICY
	watchBuffer     = 1 << 20 // bytes
	watchGone       = time.Second
)

// pathsWatch is the state of WatchPaths.
type pathsWatch struct {
	ns      *NS
	path    string
	changed func([]Change)
	known   reaches
	qdiscs  qdiscs

	mu      sync.Mutex // one call of changed at a time
	files   []*os.File
	stopped sync.Once
	err     error
}

func (w *pathsWatch) stop() error {
	w.stopped.Do(func() {
		errs := []error{w.ns.Close()}
		for _, f := range w.files {
			errs = append(errs, f.Close())
		}
		w.err = errors.Join(errs...)
	})
	return w.err
}

func (w *pathsWatch) tell(changes ...Change) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changed(changes)
}

// plain follows a socket with one cause for all messages.
func (w *pathsWatch) plain(cause Cause) func(*os.File, syscall.RawConn) {
	return func(_ *os.File, conn syscall.RawConn) {
		follow(conn, drain, func() { w.tell(Change{Cause: cause}) })
	}
}

// rtnetlink follows the socket with most messages, and checks from time to time whether the
// namespace still exists.
func (w *pathsWatch) rtnetlink(f *os.File, conn syscall.RawConn) {
	var changes []Change
	for looked := time.Now(); ; {
		if now := time.Now(); w.path != "" && now.Sub(looked) >= watchGone {
			if looked = now; w.gone() {
				_ = w.stop() // sockets have nothing to lose
				w.tell(Change{Cause: Gone})
				return
			}
		}
		// After a time without messages, look at the namespace.
		if w.path != "" && f.SetReadDeadline(looked.Add(watchGone)) != nil {
			return // closed
		}
		follow(conn, func(fd int) bool {
			changes = w.told(fd)
			return len(changes) > 0
		}, func() { w.tell(changes...) })
		if f.SetReadDeadline(time.Time{}) != nil {
			return
		}
	}
}

// gone reports whether the path leads elsewhere now, or nowhere. A path that cannot be examined at
// the moment may still be there.
func (w *pathsWatch) gone() bool {
	there, err := Open(w.path)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNotNS) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOTDIR)
	}
	defer there.Close()
	return there.Inode() != w.ns.inode
}

// told reads all pending messages, and returns the distinct changes.
func (w *pathsWatch) told(fd int) (changes []Change) {
	once := make(map[Change]bool)
	lost := messages(fd, func(m syscall.NetlinkMessage) {
		if c, ok := w.change(m); ok && !once[c] {
			once[c] = true
			changes = append(changes, c)
		}
	})
	if lost {
		w.known.lost(w.ns)
	}
	if lost || len(changes) > mostChanges {
		return []Change{{Cause: Overrun}}
	}
	return changes
}

// change converts a message; ok is false if it is no change.
func (w *pathsWatch) change(m syscall.NetlinkMessage) (c Change, ok bool) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_NEWVLAN, unix.RTM_DELVLAN:
		return Change{LinkChanged, aboutDevice(m.Data)}, true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return Change{AddressChanged, aboutDevice(m.Data)}, true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, _, _ := parseRoute(m.Data)
		return Change{RouteChanged, r.Device}, true
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP, unix.RTM_NEWNEXTHOPBUCKET, unix.RTM_DELNEXTHOPBUCKET:
		return Change{Cause: RouteChanged}, true
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC:
		return Change{FilterChanged, aboutDevice(m.Data)}, w.qdiscs.hear(m)
	case unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER, unix.RTM_NEWCHAIN, unix.RTM_DELCHAIN:
		return Change{FilterChanged, aboutDevice(m.Data)}, true
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		n, ok, err := parseNeighbour(m.Data)
		if err != nil || !ok {
			return Change{}, false
		}
		cause := NeighbourChanged
		if n.FDB() {
			cause = FDBChanged
		}
		return Change{cause, n.Device}, w.known.hear(n, m.Header.Type == unix.RTM_DELNEIGH)
	}
	return Change{}, false // classes, which change with every rate
}

// qdiscs is the last message about each qdisc: struct tcmsg, and the kind. The kernel also notifies
// all listeners of a qdisc when a process has only asked for it.
type qdiscs map[[2]uint32]string

// mostQdiscs limits it. Beyond that, each message counts as a change.
const mostQdiscs = 4096

// hear takes a message, and reports whether the device's qdisc differs from before. The first
// message about a qdisc may be a change.
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
	attrs, err := attributes(m.Data[size:])
	if err != nil {
		return true
	}
	for _, a := range attrs {
		if a.Attr.Type == unix.TCA_KIND {
			what += unix.ByteSliceToString(a.Value)
		}
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
	full bool           // too many to keep: an unknown one may have been there
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

// hear takes a message about an entry, and reports whether it changes what was known.
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
		clear(r.ever) // of entries that went long ago
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
