package sandbox

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// End is one end of a veth pair.
type End struct {
	Box    *Box
	Name   string       // name of the device
	Addr   netip.Prefix // zero value: no address
	MAC    string       // "": the kernel chooses
	Queues int          // receive queues, and transmit queues; 0: 1
	Bridge string       // bridge in Box of which it becomes a port; "": none
}

// Wire joins two sandboxes by a veth pair and sets both ends up. The pair goes when either namespace
// goes.
func Wire(a, b End) error {
	if err := wire(a, b); err != nil {
		return fmt.Errorf("wire %s of %s to %s of %s: %w", a.Name, a.Box.Name, b.Name, b.Box.Name, err)
	}
	return nil
}

func wire(a, b End) error {
	macA, err := parseMAC(a.MAC)
	if err != nil {
		return err
	}
	macB, err := parseMAC(b.MAC)
	if err != nil {
		return err
	}
	qa, qb := max(a.Queues, 1), max(b.Queues, 1)
	veth := &netlink.Veth{
		LinkAttrs:        netlink.LinkAttrs{Name: a.Name, HardwareAddr: macA, NumTxQueues: qa, NumRxQueues: qa},
		PeerName:         b.Name,
		PeerHardwareAddr: macB,
		PeerNumTxQueues:  uint32(qb),
		PeerNumRxQueues:  uint32(qb),
		PeerNamespace:    netlink.NsFd(int(b.Box.ns.Fd())),
	}
	if err := a.Box.Netlink(func(h *netlink.Handle) error { return h.LinkAdd(veth) }); err != nil {
		return err
	}
	for _, e := range []End{a, b} {
		if err := e.Box.Netlink(e.up); err != nil {
			return fmt.Errorf("set up %s: %w", e.Name, err)
		}
	}
	return nil
}

func parseMAC(s string) (net.HardwareAddr, error) {
	if s == "" {
		return nil, nil
	}
	return net.ParseMAC(s)
}

func (e End) up(h *netlink.Handle) error {
	link, err := h.LinkByName(e.Name)
	if err != nil {
		return err
	}
	if e.Bridge != "" {
		br, err := h.LinkByName(e.Bridge)
		if err != nil {
			return err
		}
		if err := h.LinkSetMaster(link, br); err != nil {
			return err
		}
	}
	if e.Addr.IsValid() {
		ip := &net.IPNet{IP: e.Addr.Addr().AsSlice(), Mask: net.CIDRMask(e.Addr.Bits(), e.Addr.Addr().BitLen())}
		if err := h.AddrAdd(link, &netlink.Addr{IPNet: ip}); err != nil {
			return err
		}
	}
	return h.LinkSetUp(link)
}

// Add creates a device of any kind as described by e, and sets it up. If e.Box is another sandbox, the
// device is there, but its other side stays in b: the device below a macvlan, or a tunnel's outer
// packets. Add ignores e.Queues.
func (b *Box) Add(link netlink.Link, e End) error {
	hw, err := parseMAC(e.MAC)
	if err == nil {
		a := link.Attrs()
		a.Name, a.HardwareAddr = e.Name, hw
		if e.Box != b {
			a.Namespace = netlink.NsFd(int(e.Box.ns.Fd()))
		}
		err = b.Netlink(func(h *netlink.Handle) error { return h.LinkAdd(link) })
	}
	if err == nil {
		err = e.Box.Netlink(e.up)
	}
	if err != nil {
		return fmt.Errorf("make %s %s of %s: %w", link.Type(), e.Name, e.Box.Name, err)
	}
	return nil
}

// Bridge creates a bridge in the sandbox. It has the address addr if that is valid.
func (b *Box) Bridge(name string, addr netip.Prefix) error {
	return b.Add(&netlink.Bridge{}, End{Box: b, Name: name, Addr: addr})
}

// LikeNIC makes a veth pair behave like a NIC and its peer. nic polls, which a veth does only with GRO.
// far, the other end, sends it no super-packets of TCP.
func LikeNIC(nic, far End) error {
	return errors.Join(far.Box.offload(far.Name, netdev.TSO, netdev.Off), nic.Box.offload(nic.Name, netdev.GRO, netdev.GRO.On()))
}

func (b *Box) offload(dev string, o netdev.Offload, value string) error {
	ns, err := b.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	index, err := ns.Index(dev)
	if err == nil {
		err = ns.Offload(index, o).Write(value)
	}
	if err != nil {
		return fmt.Errorf("set %s of %s of %s: %w", o, dev, b.Name, err)
	}
	return nil
}

// Neighbour sets the MAC address of an IP address on a device permanently, so that no address
// resolution is lost in a flood.
func (b *Box) Neighbour(dev string, ip netip.Addr, mac string) error {
	return b.neigh(dev, mac, netlink.Neigh{IP: ip.AsSlice(), State: netlink.NUD_PERMANENT})
}

// Forward enters a MAC address permanently into the FDB of the device's bridge. Otherwise the bridge
// would flood packets to a receiver that never sends, because it cannot learn that address.
func (b *Box) Forward(dev, mac string) error {
	return b.neigh(dev, mac, netlink.Neigh{Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP})
}

// Remote enters the host of a MAC address permanently into the FDB of a tunnel device.
func (b *Box) Remote(dev, mac, host string) error {
	return b.neigh(dev, mac, netlink.Neigh{Family: unix.AF_BRIDGE, IP: net.ParseIP(host), Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT})
}

func (b *Box) neigh(dev, mac string, n netlink.Neigh) error {
	hw, err := net.ParseMAC(mac)
	if err == nil {
		err = b.Change(dev, func(h *netlink.Handle, link netlink.Link) error {
			n.LinkIndex, n.HardwareAddr = link.Attrs().Index, hw
			return h.NeighSet(&n)
		})
	}
	if err != nil {
		return fmt.Errorf("set neighbour %s %v on %s of %s: %w", mac, n.IP, dev, b.Name, err)
	}
	return nil
}

// Delete removes a device of the sandbox.
func (b *Box) Delete(dev string) error {
	if err := b.Change(dev, (*netlink.Handle).LinkDel); err != nil {
		return fmt.Errorf("delete %s of %s: %w", dev, b.Name, err)
	}
	return nil
}

func (b *Box) loopbackUp() error { return b.Change("lo", (*netlink.Handle).LinkSetUp) }

// Netlink runs fn with an rtnetlink socket of the sandbox's namespace.
func (b *Box) Netlink(fn func(*netlink.Handle) error) error {
	var h *netlink.Handle
	err := b.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return err
	}
	defer h.Close()
	return fn(h)
}

// Change runs fn with an rtnetlink socket of the sandbox's namespace and a device there.
func (b *Box) Change(dev string, fn func(*netlink.Handle, netlink.Link) error) error {
	return b.Netlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(dev)
		if err != nil {
			return err
		}
		return fn(h, link)
	})
}

// Do runs fn on a thread in the sandbox's network namespace. Goroutines that fn starts run outside it.
func (b *Box) Do(fn func() error) error {
	ns, err := b.open()
	if err != nil {
		return fmt.Errorf("enter sandbox %s: %w", b.Name, err)
	}
	defer ns.Close()
	return ns.Do(fn)
}

func (b *Box) open() (*netdev.NS, error) {
	return netdev.Open(fmt.Sprintf("%s/self/fd/%d", b.host.roots.Proc, b.ns.Fd()))
}

// Sysctl writes a network setting of the sandbox; name is the path below proc/sys/net:
// "ipv6/conf/all/disable_ipv6".
func (b *Box) Sysctl(name, value string) error {
	// proc/sys/net shows the namespace of the thread that opens it.
	return b.Do(func() error {
		return os.WriteFile(filepath.Join(b.host.roots.Proc, "sys", "net", name), []byte(value), 0)
	})
}

// Sysfs runs fn with the path of a writable sysfs that shows the sandbox's devices. The sysfs is not
// mounted: the path is valid only on the thread of fn, so goroutines of fn must not open files there.
func (b *Box) Sysfs(fn func(sys string) error) error {
	ns, err := b.open()
	if err != nil {
		return fmt.Errorf("sysfs of sandbox %s: %w", b.Name, err)
	}
	defer ns.Close()
	return ns.Sysfs(true, func(root *os.Root) error { return fn(root.Name()) })
}

// SetQueues writes one attribute, such as rps_cpus or xps_cpus, of every receive ("rx") or transmit
// ("tx") queue of a device. It calls value with the queue's number.
func (b *Box) SetQueues(dev, direction, attribute string, value func(queue int) string) error {
	return b.Sysfs(func(sys string) error {
		for q := 0; ; q++ {
			dir := filepath.Join(sys, "class/net", dev, "queues", fmt.Sprintf("%s-%d", direction, q))
			if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) && q > 0 {
				return nil
			}
			if err := os.WriteFile(filepath.Join(dir, attribute), []byte(value(q)), 0); err != nil {
				return err
			}
		}
	})
}
