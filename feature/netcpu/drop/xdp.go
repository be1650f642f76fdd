package drop

import (
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// driver drops packets at one uplink by native XDP. Like a tcx link it ends with this process, however
// that ends, and the driver undoes its own changes. So the journal needs no entry.
type driver struct {
	link link.Link
	mac  string // MAC address of the uplink, which identifies packets for the host
}

// native loads a copy of fl_drop_xdp for a device with this address.
func (d *Dropper) native(mac string) (*ebpf.Program, error) {
	addr, err := net.ParseMAC(mac)
	if err != nil {
		return nil, fmt.Errorf("address of the device: %w", err)
	}
	xdp, err := d.object.Program(dropProgFlDropXdp, bpf.Vars{dropVarFlUplinkMac: [6]byte(addr)})
	if err != nil {
		return nil, err
	}
	if err := d.charge(); err != nil {
		return nil, errors.Join(fmt.Errorf("charge what is dropped: %w", err), xdp.Close())
	}
	return xdp, nil
}

// charge starts to charge for packets that XDP drops.
func (d *Dropper) charge() error {
	if d.charges || d.cfg.Meter == nil {
		return nil
	}
	charger, err := d.cfg.Meter.Taker()
	if err != nil {
		return err
	}
	defer charger.Close() // the map keeps it
	if err := d.maps.FlCharger.Put(uint32(0), charger); err != nil {
		return err
	}
	d.charges = true
	return nil
}

// attachXDP starts early drop in the driver of a device.
func (d *Dropper) attachXDP(ns *netdev.NS, index int) (*driver, error) {
	own, err := ns.Link(index)
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	xdp, err := d.native(own.MAC)
	if err != nil {
		return nil, fmt.Errorf("early drop: load XDP: %w", err)
	}
	defer xdp.Close() // the link keeps it
	l, err := ns.AttachXDP(index, xdp)
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	return &driver{l, own.MAC}, nil
}

// hold updates the program to the present address of the uplink. If that fails, the old program stays.
// journal.ErrGone means that the program is not at this device: its device has gone, and another may
// have the index.
func (x *driver) hold(d *Dropper, l netdev.Link) error {
	info, err := x.link.Info()
	if err != nil {
		return fmt.Errorf("early drop: look at XDP: %w", err)
	}
	if at := info.XDP(); at == nil || int(at.Ifindex) != l.Index {
		return fmt.Errorf("early drop: XDP at device %d: %w", l.Index, journal.ErrGone)
	}
	if x.mac == l.MAC {
		return nil
	}
	xdp, err := d.native(l.MAC)
	if err != nil {
		return fmt.Errorf("early drop: load XDP: %w", err)
	}
	defer xdp.Close()
	err = x.link.Update(xdp)
	if errors.Is(err, unix.ENOLINK) { // the device has gone since Info
		return fmt.Errorf("early drop: replace XDP: %w: %w", journal.ErrGone, err)
	}
	if err != nil {
		return fmt.Errorf("early drop: replace XDP: %w", err)
	}
	x.mac = l.MAC
	return nil
}
