package netdev

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// NoDevice is the value of an IFB or pair knob without a device of ours. Any value other than this
// and OurIFB or OurPair describes a foreign device of that name, which we neither use nor remove.
const NoDevice = "none"

// made is the knob of a device that we make for another device. Its address marks it as ours.
type made struct {
	ns     *NS
	index  int    // of the device that it serves
	kind   string // of the knob, and its value with the device
	detail string // of the knob's reference
	name   string
	link   string // its type
	mac    [6]byte
	make   func() error // nil: the knob can only remove it
}

// Ref implements journal.Knob.
func (m made) Ref() journal.Ref { return deviceRef(m.kind, m.ns, m.index, m.detail) }

// Read implements journal.Knob.
func (m made) Read() (string, error) {
	now, _, err := m.find()
	return now, err
}

// Unmarked tells the journal that a device with our address is ours even without an entry.
func (m made) Unmarked(value string) (before string, ours bool) { return NoDevice, value == m.kind }

// find returns the value of the knob, and the device with its name, or nil.
func (m made) find() (now string, l netlink.Link, err error) {
	err = m.ns.with(func(h *netlink.Handle) error {
		l, err = h.LinkByName(m.name)
		return err
	})
	switch {
	case NoLink(err):
		return NoDevice, nil, nil
	case err != nil:
		return "", nil, fmt.Errorf("look for %s in netns %d: %w", m.name, m.ns.inode, err)
	case l.Type() == m.link && l.Attrs().HardwareAddr.String() == net.HardwareAddr(m.mac[:]).String():
		return m.kind, l, nil
	}
	return fmt.Sprintf("somebody's %s, index %d", l.Type(), l.Attrs().Index), l, nil
}

// ours returns the device. Errors: ErrNoLink if we have made none.
func (m made) ours() (netlink.Link, error) {
	now, l, err := m.find()
	if err == nil && now != m.kind {
		err = fmt.Errorf("look for %s in netns %d: %w", m.name, m.ns.inode, ErrNoLink)
	}
	return l, err
}

// Write implements journal.Knob.
func (m made) Write(value string) error {
	now, l, err := m.find()
	if err != nil || now == value {
		return err
	}
	switch {
	case now == NoDevice && value == m.kind && m.make != nil:
		if err := m.make(); err != nil {
			return fmt.Errorf("make %s in netns %d: %w", m.name, m.ns.inode, err)
		}
		return nil
	case now == m.kind && value == NoDevice:
		err := m.ns.with(func(h *netlink.Handle) error { return h.LinkDel(l) })
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("remove %s in netns %d: %w", m.name, m.ns.inode, err)
		}
		return nil
	}
	return fmt.Errorf("make %s of %s in netns %d: there is %s", value, m.name, m.ns.inode, now)
}
