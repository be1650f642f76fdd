package netdev

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The values of an IFB knob. Any other value describes a foreign device of that name, which is
// neither used nor removed.
const (
	NoIFB  = "none"
	OurIFB = "ifb"
)

// ifbMAC is the address of each of our IFBs, and identifies them: "\2flifb", locally administered.
// Nothing is ever sent to it. Unlike an alias it can be set in the call that makes the device.
var ifbMAC = [6]byte{0x02, 'f', 'l', 'i', 'f', 'b'}

// ifbQueue is the queue length of an IFB, in packets. The kernel's default (32) is for packets of
// local senders; these have crossed the wire already.
const ifbQueue = 1000

// IFBName returns the name of the IFB for what the device with an index receives.
func IFBName(index int) string { return fmt.Sprintf("flifb%d", index) }

// IFB returns the knob of the intermediate functional block for a device, which shapes what that
// device receives at its own egress. Write of OurIFB makes it, up and with no packets redirected to
// it; NoIFB removes it. A foreign device of its name is no error of Read, but is one of Write.
func (ns *NS) IFB(index int) journal.Knob { return ifb{ns, index} }

type ifb struct {
	ns    *NS
	index int // of the device that it is for
}

func (i ifb) Ref() journal.Ref { return deviceRef(KindIFB, i.ns, i.index, "ifb") }

func (i ifb) Read() (string, error) {
	l, err := i.link()
	if err != nil {
		return "", fmt.Errorf("look for %s in netns %d: %w", IFBName(i.index), i.ns.inode, err)
	}
	switch {
	case l == nil:
		return NoIFB, nil
	case l.Type() == "ifb" && l.Attrs().HardwareAddr.String() == net.HardwareAddr(ifbMAC[:]).String():
		return OurIFB, nil
	}
	return fmt.Sprintf("somebody's %s, index %d", l.Type(), l.Attrs().Index), nil
}

// link returns the device of our name, or nil.
func (i ifb) link() (l netlink.Link, err error) {
	err = i.ns.with(func(h *netlink.Handle) error {
		l, err = h.LinkByName(IFBName(i.index))
		return err
	})
	if NoLink(err) {
		return nil, nil
	}
	return l, err
}

func (i ifb) Write(value string) error {
	now, err := i.Read()
	if err != nil || now == value {
		return err
	}
	name := IFBName(i.index)
	switch {
	case now == NoIFB && value == OurIFB:
		a := netlink.LinkAttrs{Name: name, TxQLen: ifbQueue, HardwareAddr: ifbMAC[:], Flags: net.FlagUp}
		err = i.ns.with(func(h *netlink.Handle) error { return h.LinkAdd(&netlink.Ifb{LinkAttrs: a}) })
		if err != nil {
			return fmt.Errorf("make %s in netns %d: %w", name, i.ns.inode, err)
		}
		return nil
	case now == OurIFB && value == NoIFB:
		l, err := i.link()
		if err != nil || l == nil {
			return err
		}
		err = i.ns.with(func(h *netlink.Handle) error { return h.LinkDel(l) })
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("remove %s in netns %d: %w", name, i.ns.inode, err)
		}
		return nil
	}
	return fmt.Errorf("make %s of %s in netns %d: there is %s", value, name, i.ns.inode, now)
}

// RaiseIFB sets the IFB for a device up again. Errors: ErrNoLink if there is none of ours.
func (ns *NS) RaiseIFB(index int) error {
	i := ifb{ns, index}
	now, err := i.Read()
	if err != nil {
		return err
	}
	if now != OurIFB {
		return fmt.Errorf("set up %s in netns %d: %w", IFBName(index), ns.inode, ErrNoLink)
	}
	l, err := i.link()
	if err == nil && l != nil {
		err = ns.with(func(h *netlink.Handle) error { return h.LinkSetUp(l) })
	}
	if err != nil {
		return fmt.Errorf("set up %s in netns %d: %w", IFBName(index), ns.inode, err)
	}
	return nil
}
