package rig

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/lab/sandbox"
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

// wireNIC creates the NIC, a port of a bridge or with an address of its own.
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
	return errors.Join(sandbox.LikeNIC(nic, outside), r.Outside.Neighbour("eth0", node, nodeMAC))
}

// tunnel joins the outside to the bridge by VXLAN.
func (r *Rig) tunnel() error {
	if err := r.Node.Bridge(Bridge, netip.Prefix{}); err != nil {
		return err
	}
	for _, end := range []struct {
		box           *sandbox.Box
		local, remote string
		sandbox.End
	}{
		{r.Node, tunnelNodeAddr, tunnelAddr, sandbox.End{Box: r.Node, Name: TunnelDevice, Bridge: Bridge}},
		{r.Outside, tunnelAddr, tunnelNodeAddr, sandbox.End{Box: r.Outside, Name: TunnelDevice, Addr: prefix(outsideAddr), MAC: outsideMAC}},
	} {
		vx := &netlink.Vxlan{
			LinkAttrs: netlink.LinkAttrs{MTU: tunnelMTU},
			VxlanId:   42, Port: 4789, SrcAddr: net.ParseIP(end.local), Group: net.ParseIP(end.remote),
		}
		if err := end.box.Add(vx, end.End); err != nil {
			return err
		}
	}
	return nil
}

// tunnelMTU is the inner MTU that fits into a packet of 1500 bytes.
const tunnelMTU = 1450

// entry returns the port of the bridge, and the device of the outside, by which packets arrive.
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

// wireMacvlans gives each container a macvlan device on the NIC.
func (r *Rig) wireMacvlans() error {
	for i, b := range r.Boxes {
		err := r.Node.Change(NICDevice, func(_ *netlink.Handle, nic netlink.Link) error {
			return r.Node.Add(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: nic.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE},
				sandbox.End{Box: b, Name: "eth0", Addr: prefix(address(i)), MAC: mac(i)})
		})
		if err != nil {
			return err
		}
		if err := errors.Join(
			r.Outside.Neighbour("eth0", netip.MustParseAddr(address(i)), mac(i)),
			b.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC)); err != nil {
			return err
		}
	}
	return nil
}

// steer moves all receive work of the host to the shared CPU. Otherwise a veth's packets are
// received on the CPU of the sender, and disturb no container. Packets to the outside are received
// on the outside's CPU.
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
		// A veth's receive queue is the sender's transmit queue. Each CPU gets one, so all of the
		// sender's packets arrive by queue SenderQueue.
		r.Outside.SetQueues("eth0", "tx", "xps_cpus", func(q int) string { return fmt.Sprintf("%x", 1<<q) }),
	)...)
}
