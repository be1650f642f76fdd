package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// OurPair is the value of a pair knob with a pair of ours.
const OurPair = KindPair

// pairMAC is the address of the inner end of each of our pairs, and identifies it: "\2flvex",
// locally administered.
var pairMAC = [6]byte{0x02, 'f', 'l', 'v', 'e', 'x'}

const genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE

// Pair returns the knob of a veth pair between this namespace and another, through which programs
// redirect packets from one into the other; it is for the device with the given index in this
// namespace. Write of OurPair makes it, both ends up and without addresses; NoDevice removes it. to
// may be nil for a removal. A foreign device of its name is no error of Read, but is one of Write.
// The pair goes with either namespace.
func (ns *NS) Pair(index int, to *NS) journal.Knob { return ns.pair(index, to) }

func (ns *NS) pair(index int, to *NS) made {
	m := made{ns: ns, index: index, kind: KindPair, detail: KindPair, name: fmt.Sprintf("flov%d", index), link: "veth", mac: pairMAC}
	if to != nil {
		m.make = func() error { return makePair(m, to) }
	}
	return m
}

func makePair(m made, to *NS) error {
	outer := fmt.Sprintf("flov%d", m.ns.inode)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = m.name, m.mac[:], 65535
	// No automatic addresses: only programs send here.
	raise := func(h *netlink.Handle, l netlink.Link) error {
		return errors.Join(h.LinkSetIP6AddrGenMode(l, genModeNone), h.LinkSetARPOff(l), h.LinkSetUp(l))
	}
	err := m.ns.with(func(h *netlink.Handle) error {
		v := &netlink.Veth{LinkAttrs: attrs, PeerName: outer, PeerNamespace: netlink.NsFd(int(to.f.Fd()))}
		if err := h.LinkAdd(v); err != nil {
			return err
		}
		return raise(h, v)
	})
	if err != nil {
		return err
	}
	_, index, err := m.ns.PairEnds(m.index)
	if err == nil {
		err = to.with(func(h *netlink.Handle) error {
			l, err := h.LinkByIndex(index)
			if err != nil {
				return err
			}
			return raise(h, l)
		})
	}
	if err != nil {
		return fmt.Errorf("set up %s in netns %d: %w", outer, to.inode, err)
	}
	return nil
}

// PairEnds returns the indices of the pair for a device: of the end in this namespace, and of the
// other end. Errors: ErrNoLink if there is none of ours.
func (ns *NS) PairEnds(index int) (inner, outer int, err error) {
	l, err := ns.pair(index, nil).ours()
	if err != nil {
		return 0, 0, err
	}
	return l.Attrs().Index, l.Attrs().ParentIndex, nil
}
