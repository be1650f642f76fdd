package rig

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Class is the tc class that an operator would create for one container by hand.
type Class struct {
	Container  int // in the order of Config.Containers
	Rate, Ceil uint64
	Prio       uint32
}

const (
	topMinor  = 0xfff0 // the class from which the others borrow
	restMinor = 0xfff1 // the class of packets that match no filter
)

// Link sets the speed of the NIC to rate, in bit/s, at the place of a NIC's own queue: its root
// qdisc is an HTB. With classes that HTB also divides the link, as an operator would do it by hand:
// one class for each container and one for all others, found by source address. Packets that match
// no filter are among the others. A rate of 0 without classes removes the HTB. Quanta and queues
// are the defaults; the bursts are 10 ms, as fairlead's are: with tc's default, one packet, HTB
// does not fill a gigabit here.
func (r *Rig) Link(rate uint64, classes []Class) error {
	err := r.Node.Change(NICDevice, func(h *netlink.Handle, nic netlink.Link) error {
		return htb(h, nic.Attrs().Index, rate, classes)
	})
	if err != nil {
		return fmt.Errorf("make %s a link of %d bit/s: %w", NICDevice, rate, err)
	}
	return nil
}

// htb replaces the root qdisc of a device by an HTB. With a link rate its classes share that rate,
// and a default class has the rest.
func htb(h *netlink.Handle, index int, rate uint64, classes []Class) error {
	root := netlink.MakeHandle(1, 0)
	htb := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index, Handle: root, Parent: netlink.HANDLE_ROOT})
	if err := h.QdiscDel(htb); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	if rate == 0 && len(classes) == 0 {
		return nil
	}
	htb.Defcls = restMinor
	if rate == 0 {
		htb.Defcls = 0
	}
	if err := h.QdiscAdd(htb); err != nil {
		return fmt.Errorf("add qdisc: %w", err)
	}
	add := func(parent uint32, minor uint16, r, ceil uint64, prio uint32) error {
		attrs := netlink.HtbClassAttrs{Rate: r, Ceil: ceil, Prio: prio}
		if rate > 0 {
			attrs.Buffer, attrs.Cbuffer = burst(r), burst(ceil)
		}
		err := h.ClassAdd(netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: index, Parent: parent, Handle: netlink.MakeHandle(1, minor)}, attrs))
		if err != nil {
			return fmt.Errorf("add class: %w", err)
		}
		return nil
	}
	parent := root
	if rate > 0 {
		parent = netlink.MakeHandle(1, topMinor)
		rest := rate
		for _, c := range classes {
			rest -= min(c.Rate, rest)
		}
		if err := errors.Join(add(root, topMinor, rate, rate, 0), add(parent, restMinor, max(rest, rate/100), rate, 7)); err != nil {
			return err
		}
	}
	for i, c := range classes {
		minor := uint16(1 + c.Container)
		if err := add(parent, minor, c.Rate, c.Ceil, c.Prio); err != nil {
			return err
		}
		addr := netip.MustParseAddr(address(c.Container)).As4()
		err := h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: root, Priority: uint16(i + 1), Protocol: unix.ETH_P_IP},
			ClassId:     netlink.MakeHandle(1, minor),
			Sel: &netlink.TcU32Sel{Nkeys: 1, Flags: netlink.TC_U32_TERMINAL, Keys: []netlink.TcU32Key{{
				Mask: ^uint32(0), Off: 12, // the source address
				Val: uint32(addr[0])<<24 | uint32(addr[1])<<16 | uint32(addr[2])<<8 | uint32(addr[3]),
			}}},
		})
		if err != nil {
			return fmt.Errorf("add filter: %w", err)
		}
	}
	return nil
}

// Sent returns the bytes of all frames that have left by the NIC. A super-packet counts as one
// frame.
func (r *Rig) Sent() (bytes uint64, err error) {
	err = r.Node.Change(NICDevice, func(_ *netlink.Handle, link netlink.Link) error {
		bytes = link.Attrs().Statistics.TxBytes
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("read what %s has sent: %w", NICDevice, err)
	}
	return bytes, nil
}

// burst returns the bytes that a rate, in bit/s, carries in 10 ms, but at least one super-packet.
func burst(rate uint64) uint32 { return uint32(max(rate/8/100, 64<<10)) }

// Uplink returns the address at which containers find a receiver that runs in Outside.
func (r *Rig) Uplink(port int) string { return fmt.Sprintf("%s:%d", outsideAddr, port) }

// At returns the address of a receiver in the i-th container, on every path but Hop, Host and
// Docker.
func (r *Rig) At(i, port int) string { return fmt.Sprintf("%s:%d", address(i), port) }

// Shape limits what the neighbours send, on the path NIC: an HTB at the NIC's egress with a class
// for each of them, with equal parts of a rate in bit/s (Iron, section 2.1). Filters find the
// classes by source address. Bursts and queues are the kernel's defaults. 0 removes the HTB, if
// there is one.
func (r *Rig) Shape(bitsPerSecond uint64) error {
	if r.Path != NIC {
		return fmt.Errorf("shape: the path %s has no NIC of the rig's own", r.Path)
	}
	var classes []Class
	each := bitsPerSecond / uint64(len(r.Neighbours()))
	for i := 1; i < len(r.Boxes) && each > 0; i++ {
		classes = append(classes, Class{Container: i, Rate: each, Ceil: each})
	}
	return r.Link(0, classes)
}
