// Package qdisc manages traffic control at a device: the queueing discipline that shapes the device
// for fairlead, with its classes; the original one, which it replaces and restores; and the hooks
// for programs.
//
// It knows devices and class numbers, not containers, and decides neither rates nor the fate of a
// packet. It touches only what carries our handle, except the root qdisc that Root replaces and
// restores. Features traffic and netcpu use it.
package qdisc

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Handle is that of our root qdiscs: "fl" in its upper half. A packet whose skb->priority is
// Handle|minor goes into that class, without any filter (net/sched/sch_htb.c, htb_classify;
// sch_hfsc.c, hfsc_classify).
const Handle uint32 = 'f'<<24 | 'l'<<16

// The minors of the classes of our roots besides the tenants'.
const (
	MinorDefault = 0xffff // for packets without a class
	MinorTop     = 0xfffe // above all others, which borrow from it
	MinorSparse  = 0xfffd // at a ceil: for flows that send little, see Sort
)

// Kind is a qdisc with classes that can be our root.
type Kind string

// The kinds.
const (
	KindHTB  Kind = "htb"
	KindHFSC Kind = "hfsc"
	// KindTBF is no root of ours, but splits packets below a class: see Class.Split.
	KindTBF Kind = "tbf"
)

// HTB holds the parameters of a class of HTB: tc-htb(8). Prio orders borrowing only: a class gets
// its own rate at any priority.
type HTB struct {
	Rate, Ceil    uint64 // bit/s; fractions of a byte are dropped
	Burst, CBurst uint32 // bytes that may be sent at device speed after a silence, on account of Rate and Ceil
	Quantum       uint32 // bytes per turn of a class that borrows
	Prio          uint32 // 0 to 7, the smallest first
}

// Curve is a service curve of HFSC, tc-hfsc(7): M1 bit/s for D, then M2. The zero Curve is none.
type Curve struct {
	M1 uint64
	D  time.Duration // whole microseconds count
	M2 uint64
}

// HFSC holds the curves of a class of HFSC.
type HFSC struct {
	RealTime, LinkShare, UpperLimit Curve
}

// Class is one class below the top, or the top itself (MinorTop). HTB or HFSC counts, by the root's
// kind.
type Class struct {
	Minor uint16
	HTB   HTB
	HFSC  HFSC
	// Split is the length in bytes, link header included, above which packets that the kernel has
	// not segmented yet (GSO) are split into frames; 0: no splitting. Any other longer packet is
	// dropped, so Split must not be less than a frame.
	Split int
}

// Stats are the counters of one class since it was made.
type Stats struct {
	Bytes, Packets  uint64 // sent
	Drops           uint64 // packets
	Backlog, Queued uint64 // bytes and packets that wait in it
	Borrowed        uint64 // packets that were sent on another's account; HTB only
	Overlimits      uint64 // how often it reached its ceil; HTB only
}

// drainTime limits the wait for a class to empty before its removal.
const (
	drainTime = 200 * time.Millisecond
	drainStep = 2 * time.Millisecond
)

// A class that waits has saved up a burst of its ceil, as time (net/sched/sch_htb.c,
// htb_accnt_ctokens). When its ceil is lowered it would spend that on top of the new one. So its
// CBurst is two frames for tightTime, and HTB cuts the savings with the next packet. If no packet
// leaves the class within that time, because others have their turn, the class keeps its savings.
const (
	tightBurst = 2 * 1514
	tightTime  = 3 * time.Millisecond
)

// ErrNotOurs is returned for classes of a device without our root qdisc.
var ErrNotOurs = errors.New("root qdisc of the device is not fairlead's")

// Device is one network device, with a socket of its own to ask about it. It is not safe for
// concurrent use.
type Device struct {
	ns     *netdev.NS
	index  int
	socket *nl.SocketHandle
}

// Open opens the device with the given index. ns has to stay open for as long as the Device does.
// If the device is absent, its methods report that.
func Open(ns *netdev.NS, index int) (*Device, error) {
	var s *nl.NetlinkSocket
	err := ns.Do(func() (err error) {
		if s, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		patience := unix.NsecToTimeval(int64(netdev.Patience))
		return errors.Join(s.SetSendTimeout(&patience), s.SetReceiveTimeout(&patience))
	})
	if err != nil {
		return nil, fmt.Errorf("open qdiscs of device %d in netns %d: %w", index, ns.Inode(), err)
	}
	return &Device{ns: ns, index: index, socket: &nl.SocketHandle{Socket: s}}, nil
}

// Close closes the socket.
func (d *Device) Close() error {
	d.socket.Socket.Close()
	return nil
}

// Bring makes the classes of our root exactly those given, and returns how many it had to add,
// change or remove. It reads first. It changes classes in place, which loses no packet, with one
// exception: a class that begins to split its packets loses those that wait, and one that stops
// loses next to nothing (see setLeaf). A class that is removed gets a moment to send its packets,
// so the caller must have directed its traffic elsewhere before. The first of the classes must be
// the top.
//
// If packets wait in a class of HTB whose ceil is lowered, Bring gives it a tight CBurst at first,
// and takes 3 ms longer, however many such classes there are. If the agent ends within these 3 ms,
// such a class keeps to its new ceil and may not quite reach it; the next Bring gives it the final
// CBurst.
//
// Errors: ErrNotOurs, and journal.ErrGone for a device that has gone.
func (d *Device) Bring(kind Kind, classes []Class) (changes int, err error) {
	if len(classes) == 0 || classes[0].Minor != MinorTop {
		return 0, d.wrap("bring classes", errors.New("the first one is not the top"))
	}
	have, cut, err := d.classes(kind)
	if err != nil {
		return 0, err
	}
	changes, tight, err := d.set(kind, have, cut, classes)
	if err := errors.Join(err, d.loosen(tight)); err != nil {
		return changes, err
	}
	for _, c := range classes {
		delete(have, c.Minor)
	}
	for _, minor := range slices.Sorted(maps.Keys(have)) {
		changes++
		if err := d.remove(kind, minor); err != nil {
			return changes, d.wrap(fmt.Sprintf("remove class %x", minor), err)
		}
	}
	return changes, nil
}

// Differs reports whether the classes of our root differ from the given ones, except for their
// Split. Errors: ErrNotOurs, journal.ErrGone.
func (d *Device) Differs(kind Kind, classes []Class) (bool, error) {
	have, err := d.ours(kind)
	if err != nil {
		return false, d.wrap("list classes", err)
	}
	for _, c := range classes {
		if old, there := have[c.Minor]; !there || !same(kind, old.options, c.options(kind)) {
			return true, nil
		}
	}
	return len(have) != len(classes), nil
}

// set adds and changes classes, up to the first error. It returns the classes that have a tight
// CBurst, with their final parameters.
func (d *Device) set(kind Kind, have map[uint16]message, cut map[uint16]leaf, classes []Class) (changes int, tight []message, err error) {
	for _, c := range classes {
		changed, err := d.setClass(kind, have, c, &tight)
		if changed {
			changes++
		}
		if err != nil {
			return changes, tight, d.wrap(fmt.Sprintf("set class %x", c.Minor), err)
		}
		if changed, err = d.setLeaf(cut[c.Minor], c); changed {
			changes++
		}
		if err != nil {
			return changes, tight, d.wrap(fmt.Sprintf("set how packets of class %x are cut", c.Minor), err)
		}
	}
	return changes, tight, nil
}

// setClass adds or changes one class.
func (d *Device) setClass(kind Kind, have map[uint16]message, c Class, tight *[]message) (changed bool, err error) {
	m := message{handle: Handle | uint32(c.Minor), parent: Handle | MinorTop, kind: string(kind), options: c.options(kind)}
	old, there := have[c.Minor]
	if there && same(kind, old.options, m.options) {
		return false, nil
	}
	if c.Minor == MinorTop {
		m.parent = Handle
	}
	flags := 0 // changes an existing class
	if !there {
		flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	}
	final := m
	saved := there && kind == KindHTB && c.Minor != MinorTop && old.stats.Queued > 0 && c.HTB.CBurst > tightBurst && lowered(old.options, m.options)
	if saved {
		c.HTB.CBurst = tightBurst
		m.options = c.options(kind)
	}
	if err := d.send(unix.RTM_NEWTCLASS, flags, m); err != nil {
		return true, err
	}
	if saved {
		*tight = append(*tight, final)
	}
	return true, nil
}

// loosen sets the final CBurst of classes. It goes on after an error.
func (d *Device) loosen(tight []message) error {
	if len(tight) == 0 {
		return nil
	}
	time.Sleep(tightTime)
	var errs []error
	for _, m := range tight {
		if err := d.send(unix.RTM_NEWTCLASS, 0, m); err != nil {
			errs = append(errs, d.wrap(fmt.Sprintf("set burst of class %x", uint16(m.handle)), err))
		}
	}
	return errors.Join(errs...)
}

// remove removes a class once it is empty, or after drainTime.
func (d *Device) remove(kind Kind, minor uint16) error {
	if err := d.Drain(kind, minor); err != nil {
		return err
	}
	err := d.send(unix.RTM_DELTCLASS, 0, message{handle: Handle | uint32(minor), kind: string(kind)})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Drain waits until the given classes of our root, or all if none is given, are empty, for
// drainTime at most. Errors: ErrNotOurs, journal.ErrGone.
func (d *Device) Drain(kind Kind, minors ...uint16) error {
	for end := time.Now().Add(drainTime); ; time.Sleep(drainStep) {
		all, err := d.ours(kind)
		if err != nil {
			return d.wrap("drain classes", err)
		}
		var queued uint64
		for minor, c := range all {
			if len(minors) == 0 || slices.Contains(minors, minor) {
				queued += c.stats.Queued
			}
		}
		if queued == 0 || time.Now().After(end) {
			return nil
		}
	}
}

// lateTime is how long Late watches whether a class sends.
const lateTime = 5 * time.Millisecond

// Late lists, by minor, the classes that are in use and would get another Prio from Bring. HTB
// takes over a class's Prio when a packet enters its empty queue, and not before
// (net/sched/sch_htb.c, htb_activate). Errors: ErrNotOurs, journal.ErrGone.
func (d *Device) Late(classes []Class) ([]uint16, error) {
	have, err := d.ours(KindHTB)
	if err != nil {
		return nil, d.wrap("list classes", err)
	}
	var changed, late []uint16
	for _, c := range classes {
		old, there := have[c.Minor]
		if prio, known := htbWord(old.options, htbOptPrio); there && known && prio != c.HTB.Prio {
			changed = append(changed, c.Minor)
		}
	}
	if len(changed) == 0 {
		return nil, nil
	}
	// The queue of a class that is served at once is empty now and then.
	time.Sleep(lateTime)
	now, err := d.ours(KindHTB)
	if err != nil {
		return nil, d.wrap("list classes", err)
	}
	for _, minor := range changed {
		if was, is := have[minor].stats, now[minor].stats; is.Queued > 0 || is.Packets != was.Packets {
			late = append(late, minor)
		}
	}
	return late, nil
}

// Stats reads the counters of all classes of our root, by minor. Errors: ErrNotOurs,
// journal.ErrGone.
func (d *Device) Stats(kind Kind) (map[uint16]Stats, error) {
	all, cut, err := d.classes(kind)
	if err != nil {
		return nil, err
	}
	out := make(map[uint16]Stats, len(all))
	for minor, c := range all {
		out[minor] = cut[minor].count(c.stats)
	}
	return out, nil
}

// RootStats reads the counters of a device's root qdisc, whoever made it; all are 0 where the kernel shows
// none. It notifies nobody. Errors: journal.ErrGone.
func RootStats(ns *netdev.NS, index int) (s Stats, err error) {
	err = root{ns, index}.do("list qdiscs", func(d *Device) error {
		list, err := d.qdiscs() // a request for the root qdisc alone would notify all listeners
		s = under(rootParent, list).stats
		return err
	})
	return s, err
}

// classes lists the classes of our root, and the qdiscs below them.
func (d *Device) classes(kind Kind) (all map[uint16]message, cut map[uint16]leaf, err error) {
	if all, err = d.ours(kind); err != nil {
		return nil, nil, d.wrap("list classes", err)
	}
	if cut, err = d.leaves(all); err != nil {
		return nil, nil, d.wrap("list leaves", err)
	}
	return all, cut, nil
}

// ours lists the classes of our root.
func (d *Device) ours(kind Kind) (map[uint16]message, error) {
	root, err := d.root()
	if err != nil {
		return nil, err
	}
	if root.handle != Handle || root.kind != string(kind) {
		return nil, ErrNotOurs
	}
	list, err := d.dump(unix.RTM_GETTCLASS, message{handle: 0})
	if err != nil {
		return nil, err
	}
	out := make(map[uint16]message)
	for _, m := range list {
		if m.handle&0xffff0000 == Handle && m.kind == string(kind) && m.handle != Handle {
			out[uint16(m.handle)] = m
		}
	}
	return out, nil
}

// root returns the root qdisc; its handle is 0 for the kernel's default.
func (d *Device) root() (message, error) {
	if m, ok := d.rootAlone(); ok {
		return m, nil
	}
	list, err := d.qdiscs()
	return under(rootParent, list), err // the kernel hides some of its own kinds
}

// under returns the qdisc with a parent; its handle is 0 if there is none.
func under(parent uint32, list []message) message {
	for _, m := range list {
		if m.parent == parent {
			return m
		}
	}
	return message{}
}

// rootAlone asks for the root qdisc only, as the kernel otherwise lists those of all devices. It
// finds none if the device has gone, or the kernel hides it. The kernel answers only a request for
// an echo (qdisc_get_notify).
func (d *Device) rootAlone() (message, bool) {
	raw, err := d.request(unix.RTM_GETQDISC, unix.NLM_F_ACK|unix.NLM_F_ECHO, message{parent: rootParent}).Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	if err != nil || len(raw) != 1 {
		return message{}, false
	}
	m, index, err := parse(raw[0])
	return m, err == nil && index == d.index && m.parent == rootParent
}

// qdiscs lists the qdiscs of the device that queue packets; all also lists the one with the hooks.
func (d *Device) qdiscs() ([]message, error) {
	list, err := d.all()
	return slices.DeleteFunc(list, func(m message) bool { return m.parent == ingressParent }), err
}

// all filters the kernel's list of all devices.
func (d *Device) all() ([]message, error) {
	if _, err := d.ns.Link(d.index); err != nil {
		return nil, gone(err)
	}
	return d.dump(unix.RTM_GETQDISC, message{})
}

// gone adds journal.ErrGone to an error for a device, or its namespace, that has gone.
func gone(err error) error {
	if netdev.NoLink(err) || errors.Is(err, netdev.ErrNoLink) || errors.Is(err, netdev.ErrNoNS) {
		return errors.Join(journal.ErrGone, err)
	}
	return err
}

func (d *Device) wrap(op string, err error) error {
	err = gone(err)
	return fmt.Errorf("%s of device %d in netns %d: %w", op, d.index, d.ns.Inode(), err)
}
