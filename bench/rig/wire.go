package rig

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

func prefix(addr string) netip.Prefix { return netip.PrefixFrom(netip.MustParseAddr(addr), 24) }

func (r *Rig) wireHop() error {
	const receiver = 1 // the victim has no network
	dev := PortPrefix + r.Containers[receiver].Name
	return errors.Join(
		sandbox.Wire(
			sandbox.End{Box: r.Node, Name: dev, Addr: prefix(outsideAddr), MAC: outsideMAC},
			sandbox.End{Box: r.Boxes[receiver], Name: "eth0", Addr: prefix(address(receiver)), MAC: mac(receiver)}),
		r.Node.Neighbour(dev, netip.MustParseAddr(address(receiver)), mac(receiver)),
		r.Boxes[receiver].Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC),
	)
}

// wireNIC makes the NIC, a port of a bridge or with an address of its own.
func (r *Rig) wireNIC(bridge string) error {
	nic := sandbox.End{Box: r.Node, Name: NICDevice, MAC: nodeMAC, Queues: 2, Bridge: bridge}
	outside := sandbox.End{Box: r.Outside, Name: "eth0", Addr: prefix(outsideAddr), MAC: outsideMAC, Queues: 2}
	node := netip.MustParseAddr(nodeAddr)
	switch {
	case r.Path == VXLAN:
		node = netip.MustParseAddr(tunnelNodeAddr)
		nic.Addr, outside.Addr = prefix(tunnelNodeAddr), prefix(tunnelAddr)
		outside.MAC = "" // the tunnel has it
	case bridge == "":
		nic.Addr = prefix(nodeAddr)
	}
	if bridge != "" {
		if err := r.Node.Bridge(bridge, netip.Prefix{}); err != nil {
			return err
		}
	}
	if err := sandbox.Wire(nic, outside); err != nil {
		return err
	}
	return errors.Join(r.likeNIC(), r.Outside.Neighbour("eth0", node, nodeMAC))
}

// tunnel joins the outside to the bridge by VXLAN.
func (r *Rig) tunnel() error {
	if err := r.Node.Bridge(Bridge, netip.Prefix{}); err != nil {
		return err
	}
	for _, end := range []struct {
		box            *sandbox.Box
		local, remote  string
		addr, hardware string
	}{{r.Node, tunnelNodeAddr, tunnelAddr, "", ""}, {r.Outside, tunnelAddr, tunnelNodeAddr, outsideAddr, outsideMAC}} {
		err := end.box.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer h.Close()
			vx := &netlink.Vxlan{
				LinkAttrs: netlink.LinkAttrs{Name: TunnelDevice, MTU: tunnelMTU},
				VxlanId:   42, Port: 4789, SrcAddr: net.ParseIP(end.local), Group: net.ParseIP(end.remote),
			}
			if end.hardware != "" {
				if vx.HardwareAddr, err = net.ParseMAC(end.hardware); err != nil {
					return err
				}
			}
			if err := h.LinkAdd(vx); err != nil {
				return err
			}
			link, err := h.LinkByName(TunnelDevice)
			if err != nil {
				return err
			}
			if end.addr == "" {
				br, err := h.LinkByName(Bridge)
				if err != nil {
					return err
				}
				if err := h.LinkSetMaster(link, br); err != nil {
					return err
				}
			} else {
				p := prefix(end.addr)
				if err := h.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}}); err != nil {
					return err
				}
			}
			return h.LinkSetUp(link)
		})
		if err != nil {
			return fmt.Errorf("make tunnel in %s: %w", end.box.Name, err)
		}
	}
	return nil
}

// tunnelMTU is what fits into a packet of 1500 bytes.
const tunnelMTU = 1450

// entry is the port of the bridge, and the device of the outside, through which
// packets come.
func (r *Rig) entry() (port, outside string) {
	if r.Path == VXLAN {
		return TunnelDevice, TunnelDevice
	}
	return NICDevice, "eth0"
}

// wireBridge joins the containers to the bridge.
func (r *Rig) wireBridge() error {
	port, outside := r.entry()
	errs := []error{r.Node.Forward(port, outsideMAC)}
	for i, b := range r.Boxes {
		dev := PortPrefix + r.Containers[i].Name
		errs = append(errs,
			sandbox.Wire(sandbox.End{Box: r.Node, Name: dev, Bridge: Bridge},
				sandbox.End{Box: b, Name: "eth0", Addr: prefix(address(i)), MAC: mac(i)}),
			r.Node.Forward(dev, mac(i)),
			r.Outside.Neighbour(outside, netip.MustParseAddr(address(i)), mac(i)),
			b.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC),
		)
	}
	return errors.Join(errs...)
}

// wireMacvlans gives each container a device on the NIC.
func (r *Rig) wireMacvlans() error {
	for i, b := range r.Boxes {
		hw, err := net.ParseMAC(mac(i))
		if err != nil {
			return err
		}
		const name = "flmacvlan" // until it is in the container
		steps := []struct {
			in *sandbox.Box
			do func(*netlink.Handle) error
		}{
			{r.Node, func(h *netlink.Handle) error {
				nic, err := h.LinkByName(NICDevice)
				if err != nil {
					return err
				}
				return h.LinkAdd(&netlink.Macvlan{
					LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: nic.Attrs().Index, HardwareAddr: hw, Namespace: netlink.NsPid(b.PID)},
					Mode:      netlink.MACVLAN_MODE_BRIDGE,
				})
			}},
			{b, func(h *netlink.Handle) error {
				link, err := h.LinkByName(name)
				if err != nil {
					return err
				}
				p := prefix(address(i))
				return errors.Join(h.LinkSetName(link, "eth0"), h.LinkSetUp(link),
					h.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}}))
			}},
		}
		for _, s := range steps {
			err := s.in.Do(func() error {
				h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
				if err != nil {
					return err
				}
				defer h.Close()
				return s.do(h)
			})
			if err != nil {
				return fmt.Errorf("make macvlan of %s: %w", b.Name, err)
			}
		}
		if err := errors.Join(
			r.Outside.Neighbour("eth0", netip.MustParseAddr(address(i)), mac(i)),
			b.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC)); err != nil {
			return err
		}
	}
	return nil
}

// likeNIC gives the NIC's veth what a real NIC has by itself: it polls (a veth
// does only with GRO), and no super-packets come by the wire.
func (r *Rig) likeNIC() error {
	for _, k := range []struct {
		box     *sandbox.Box
		dev     string
		offload netdev.Offload
		on      bool
	}{{r.Outside, "eth0", netdev.TSO, false}, {r.Node, NICDevice, netdev.GRO, true}} {
		if err := setOffload(k.box, k.dev, k.offload, k.on); err != nil {
			return err
		}
	}
	return nil
}

func setOffload(b *sandbox.Box, dev string, group netdev.Offload, on bool) error {
	ns, err := netdev.Open(b.NetNS())
	if err != nil {
		return err
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	if err != nil {
		return err
	}
	value := netdev.Off
	if on {
		value = group.On()
	}
	for _, l := range links {
		if l.Name == dev {
			return ns.Offload(l.Index, group).Write(value)
		}
	}
	return fmt.Errorf("set %s of %s: no such device", group, dev)
}

// steer brings all receive work of the host to the shared CPU: without that, a
// veth's packets are received on the CPU of the sender, and nobody is disturbed.
// What comes to the world outside is received on the CPU of that.
func (r *Rig) steer() error {
	if r.Unsteered {
		return nil
	}
	shared := func(int) string { return fmt.Sprintf("%x", 1<<SharedCPU) }
	var errs []error
	for i, b := range r.Boxes {
		if r.Path == Hop && i == 0 || r.Path == Host {
			continue // it has no device of its own
		}
		errs = append(errs, b.SetQueues("eth0", "rx", "rps_cpus", shared))
	}
	if r.Path == Hop {
		return errors.Join(errs...)
	}
	return errors.Join(append(errs,
		r.Node.SetQueues(NICDevice, "rx", "rps_cpus", shared),
		r.Outside.SetQueues("eth0", "rx", "rps_cpus", func(int) string { return fmt.Sprintf("%x", 1<<SenderCPU) }),
		// A veth's receive queue is the sender's transmit queue. Each CPU gets
		// one, so the sender's packets all come by queue SenderQueue.
		r.Outside.SetQueues("eth0", "tx", "xps_cpus", func(q int) string { return fmt.Sprintf("%x", 1<<q) }),
	)...)
}
