package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"

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

// wireNIC creates the NIC. It is a port of bridge, or has an address if bridge is "".
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

// tunnelMTU is the inner MTU that fits into an outer packet of 1500 bytes.
const tunnelMTU = 1450

// wireBridge joins the containers to the bridge.
func (r *Rig) wireBridge() error {
	port, outside := NICDevice, "eth0" // devices on both sides of the wire or tunnel
	if r.Path == VXLAN {
		port, outside = TunnelDevice, TunnelDevice
	}
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
		err := errors.Join(
			r.Node.Change(NICDevice, func(_ *netlink.Handle, nic netlink.Link) error {
				return r.Node.Add(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: nic.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE},
					sandbox.End{Box: b, Name: "eth0", Addr: prefix(address(i)), MAC: mac(i)})
			}),
			r.Outside.Neighbour("eth0", netip.MustParseAddr(address(i)), mac(i)),
			b.Neighbour("eth0", netip.MustParseAddr(outsideAddr), outsideMAC))
		if err != nil {
			return err
		}
	}
	return nil
}

// steer moves all receive work of the host to the shared CPU. Otherwise the sender's CPU would receive
// a veth's packets, and they would disturb no container. The outside's CPU receives packets to the
// outside.
func (r *Rig) steer() error {
	if r.Unsteered {
		return nil
	}
	shared := func(int) string { return fmt.Sprintf("%x", 1<<SharedCPU) }
	var errs []error
	for i, b := range r.Boxes {
		if r.Path == Hop && i == 0 || r.Path == Host {
			continue // the container has no device
		}
		errs = append(errs, b.SetQueues("eth0", "rx", "rps_cpus", shared))
	}
	if r.Path == Hop {
		return errors.Join(errs...)
	}
	return errors.Join(append(errs,
		r.Node.SetQueues(NICDevice, "rx", "rps_cpus", shared),
		r.Outside.SetQueues("eth0", "rx", "rps_cpus", func(int) string { return fmt.Sprintf("%x", 1<<SenderCPU) }),
		// A veth's receive queue is the sender's transmit queue. Each CPU gets one transmit queue, so
		// all of the sender's packets arrive by queue SenderCPU.
		r.Outside.SetQueues("eth0", "tx", "xps_cpus", func(q int) string { return fmt.Sprintf("%x", 1<<q) }),
	)...)
}

// Class is the tc class that an operator would create for one container by hand.
type Class struct {
	Container  int // index in Config.Containers
	Rate, Ceil uint64
	Prio       uint32
}

const (
	topMinor  = 0xfff0 // the class from which the others borrow
	restMinor = 0xfff1 // the class of packets that match no filter
)

// Link limits the NIC to rate, in bit/s, with an HTB as its root qdisc, which takes the place of a real
// NIC's queue. With classes the HTB also divides the link as an operator would by hand: filters find
// one class for each container by source address, and one class gets all other packets. A rate of 0
// without classes removes the HTB. Quanta and queues are the defaults. Bursts are 10 ms, as in
// fairlead: with tc's default of one packet HTB does not fill a gigabit here. Link needs the program
// tc.
func (r *Rig) Link(ctx context.Context, rate uint64, classes []Class) error {
	var batch strings.Builder
	tc := func(format string, args ...any) { fmt.Fprintf(&batch, format+"\n", args...) }
	// Add a qdisc before the removal, which fails if there is none.
	tc("qdisc replace dev %s root handle 2: pfifo", NICDevice)
	tc("qdisc del dev %s root", NICDevice)
	class := func(parent, minor int, r, ceil uint64, prio uint32) {
		bursts := ""
		if rate > 0 {
			bursts = fmt.Sprintf(" burst %d cburst %d", burst(r), burst(ceil))
		}
		tc("class add dev %s parent 1:%x classid 1:%x htb rate %dbit ceil %dbit prio %d%s", NICDevice, parent, minor, r, ceil, prio, bursts)
	}
	parent, rest := 0, 0
	if rate > 0 {
		parent, rest = topMinor, restMinor
	}
	if rate > 0 || len(classes) > 0 {
		tc("qdisc add dev %s root handle 1: htb default %x", NICDevice, rest)
	}
	if rate > 0 {
		left := rate
		for _, c := range classes {
			left -= min(c.Rate, left)
		}
		class(0, parent, rate, rate, 0)
		class(parent, rest, max(left, rate/100), rate, 7)
	}
	for i, c := range classes {
		class(parent, 1+c.Container, c.Rate, c.Ceil, c.Prio)
		tc("filter add dev %s parent 1: protocol ip prio %d u32 match ip src %s/32 flowid 1:%x", NICDevice, i+1, address(c.Container), 1+c.Container)
	}
	if err := r.feed(ctx, batch.String(), "tc", "-batch", "-"); err != nil {
		return fmt.Errorf("make %s a link of %d bit/s: %w", NICDevice, rate, err)
	}
	return nil
}

// feed runs a program in Node with text as its standard input.
func (r *Rig) feed(ctx context.Context, text, program string, args ...string) error {
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(text)
	return r.Node.Run(ctx, cmd)
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

// Uplink returns the address at which containers reach a receiver in Outside.
func (r *Rig) Uplink(port int) string { return fmt.Sprintf("%s:%d", outsideAddr, port) }

// At returns the address of a receiver in the i-th container, on every path but Hop, Host and
// Docker.
func (r *Rig) At(i, port int) string { return fmt.Sprintf("%s:%d", address(i), port) }

// Shape limits the neighbours' sending on the path NIC (Iron, section 2.1). An HTB at the NIC's egress
// has a class for each neighbour, with equal parts of a rate in bit/s. Filters find the classes by
// source address. Bursts and queues are the kernel's defaults. A rate of 0 removes the HTB, if there is
// one.
func (r *Rig) Shape(ctx context.Context, bitsPerSecond uint64) error {
	if r.Path != NIC {
		return fmt.Errorf("shape: the path %s has no NIC of the rig's own", r.Path)
	}
	var classes []Class
	each := bitsPerSecond / uint64(len(r.Neighbours()))
	for i := 1; i < len(r.Boxes) && each > 0; i++ {
		classes = append(classes, Class{Container: i, Rate: each, Ceil: each})
	}
	return r.Link(ctx, 0, classes)
}
