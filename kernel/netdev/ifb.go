package netdev

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// OurIFB is the value of an IFB knob with an IFB of ours.
const OurIFB = KindIFB

// ifbMAC is the address of each of our IFBs, and identifies them: "\2flifb", locally administered.
// Nothing is ever sent to it. Unlike an alias it can be set in the call that makes the device.
var ifbMAC = [6]byte{0x02, 'f', 'l', 'i', 'f', 'b'}

// ifbQueue is the queue length of an IFB, in packets. The kernel's default (32) is for packets of
// local senders; these have crossed the wire already.
const ifbQueue = 1000

const ifbSent = "sent" // detail of the reference of an IFB for what devices send

// IFBName returns the name of the IFB for what a device receives, or with sent, for what it and
// others send.
func IFBName(index int, sent bool) string {
	if sent {
		return fmt.Sprintf("flsum%d", index)
	}
	return fmt.Sprintf("flifb%d", index)
}

// IFB returns the knob of the intermediate functional block for a device, which shapes what that
// device receives, or what it and others send, at its own egress. Write of OurIFB makes it, up and
// with no packets redirected to it; NoDevice removes it. A foreign device of its name is no error of
// Read, but is one of Write.
func (ns *NS) IFB(index int, sent bool) journal.Knob { return ns.ifb(index, sent) }

func (ns *NS) ifb(index int, sent bool) made {
	m := made{ns: ns, index: index, kind: KindIFB, detail: KindIFB, name: IFBName(index, sent), link: "ifb", mac: ifbMAC}
	if sent {
		m.detail = ifbSent
	}
	m.make = func() error {
		a := netlink.LinkAttrs{Name: m.name, TxQLen: ifbQueue, HardwareAddr: m.mac[:], Flags: net.FlagUp}
		return ns.with(func(h *netlink.Handle) error { return h.LinkAdd(&netlink.Ifb{LinkAttrs: a}) })
	}
	return m
}

// RaiseIFB sets the IFB for a device up again. Errors: ErrNoLink if we have made none.
func (ns *NS) RaiseIFB(index int, sent bool) error {
	l, err := ns.ifb(index, sent).ours()
	if err == nil {
		err = ns.with(func(h *netlink.Handle) error { return h.LinkSetUp(l) })
	}
	if err != nil {
		return fmt.Errorf("set up %s in netns %d: %w", IFBName(index, sent), ns.inode, err)
	}
	return nil
}
