package netdev

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// The values of a pair knob. Any other value describes a foreign device of that name, which is
// neither used nor removed.
const (
	NoPair  = "none"
	OurPair = "pair"
)

// pairMAC is the address of the inner end of each of our pairs, and identifies it: "\2flvex",
// locally administered.
var pairMAC = [6]byte{0x02, 'f', 'l', 'v', 'e', 'x'}

const genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE

// pairName is the name of the inner end of the pair for a device.
func pairName(index int) string { return fmt.Sprintf("flov%d", index) }

// Pair returns the knob of a veth pair between this namespace and another, through which programs
// redirect packets from one into the other; it is for the device with the given index in this
// namespace. Write of OurPair makes it, both ends up and without addresses; NoPair removes it. to
// may be nil for a removal. A foreign device of its name is no error of Read, but is one of Write.
// The pair goes with either namespace.
func (ns *NS) Pair(index int, to *NS) journal.Knob { return pair{ns, index, to} }

type pair struct {
	ns    *NS
	index int
	to    *NS
}

func (p pair) Ref() journal.Ref { return deviceRef(KindPair, p.ns, p.index, "pair") }

func (p pair) Read() (string, error) {
	l, err := p.link()
	if err != nil {
		return "", fmt.Errorf("look for %s in netns %d: %w", pairName(p.index), p.ns.inode, err)
	}
	switch {
	case l == nil:
		return NoPair, nil
	case l.Type() == "veth" && l.Attrs().HardwareAddr.String() == net.HardwareAddr(pairMAC[:]).String():
		return OurPair, nil
	}
	return fmt.Sprintf("somebody's %s, index %d", l.Type(), l.Attrs().Index), nil
}

// link returns the device of our name, or nil.
func (p pair) link() (l netlink.Link, err error) {
	err = p.ns.with(func(h *netlink.Handle) error {
		l, err = h.LinkByName(pairName(p.index))
		return err
	})
	if NoLink(err) {
		return nil, nil
	}
	return l, err
}

func (p pair) Write(value string) error {
	now, err := p.Read()
	if err != nil || now == value {
		return err
	}
	switch {
	case now == NoPair && value == OurPair && p.to != nil:
		return p.make()
	case now == OurPair && value == NoPair:
		l, err := p.link()
		if err != nil || l == nil {
			return err
		}
		err = p.ns.with(func(h *netlink.Handle) error { return h.LinkDel(l) })
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("remove %s in netns %d: %w", pairName(p.index), p.ns.inode, err)
		}
		return nil
	}
	return fmt.Errorf("make %s of %s in netns %d: there is %s", value, pairName(p.index), p.ns.inode, now)
}

func (p pair) make() error {
	outer := fmt.Sprintf("flov%d", p.ns.inode)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = pairName(p.index), pairMAC[:], 65535
	err := p.ns.with(func(h *netlink.Handle) error {
		v := &netlink.Veth{LinkAttrs: attrs, PeerName: outer, PeerNamespace: netlink.NsFd(int(p.to.f.Fd()))}
		if err := h.LinkAdd(v); err != nil {
			return err
		}
		// No automatic addresses: only programs send here.
		return errors.Join(h.LinkSetIP6AddrGenMode(v, genModeNone), h.LinkSetARPOff(v), h.LinkSetUp(v))
	})
	if err != nil {
		return fmt.Errorf("make %s in netns %d: %w", attrs.Name, p.ns.inode, err)
	}
	_, index, err := p.ns.PairEnds(p.index)
	if err == nil {
		err = p.to.with(func(h *netlink.Handle) error {
			l, err := h.LinkByIndex(index)
			if err != nil {
				return err
			}
			return errors.Join(h.LinkSetIP6AddrGenMode(l, genModeNone), h.LinkSetARPOff(l), h.LinkSetUp(l))
		})
	}
	if err != nil {
		return fmt.Errorf("set up %s in netns %d: %w", outer, p.to.inode, err)
	}
	return nil
}

// PairEnds returns the indices of the pair for a device: of the end in this namespace, and of the
// other end. Errors: ErrNoLink if there is none of ours.
func (ns *NS) PairEnds(index int) (inner, outer int, err error) {
	p := pair{ns: ns, index: index}
	now, err := p.Read()
	if err != nil {
		return 0, 0, err
	}
	l, err := p.link()
	if err != nil {
		return 0, 0, err
	}
	if now != OurPair || l == nil {
		return 0, 0, fmt.Errorf("look for %s in netns %d: %w", pairName(index), ns.inode, ErrNoLink)
	}
	return l.Attrs().Index, l.Attrs().ParentIndex, nil
}
