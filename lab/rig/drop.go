package rig

import (
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// DropPoint is the place, on the path NIC, where all packets from outside for the neighbours are
// dropped.
type DropPoint string

// The places, from the outside in. A real NIC is polled on the CPU of its interrupt; this one, a
// veth, is polled on the sender's CPU, and so is its XDP. AtXDP therefore stands for a drop that
// costs the containers' CPU nothing, such as one in hardware. AtUplink is tc ingress of the NIC,
// behind RPS; AtPorts are the host ends of the containers' veths, behind the bridge.
const (
	AtXDP    DropPoint = "xdp"
	AtUplink DropPoint = "uplink"
	AtPorts  DropPoint = "ports"
)

// Drop starts to drop at one place, and stops at the last one; "" only stops. The programs drop
// every packet without a look at it, which is the least that a place can cost.
func (r *Rig) Drop(at DropPoint) error {
	if err := r.stopDrop(); err != nil {
		return fmt.Errorf("stop dropping: %w", err)
	}
	if at == "" {
		return nil
	}
	if r.Path != NIC {
		return fmt.Errorf("drop: the path %s has no NIC of the rig's own", r.Path)
	}
	err := r.startDrop(at)
	if err != nil {
		return errors.Join(fmt.Errorf("drop at %s: %w", at, err), r.stopDrop())
	}
	return nil
}

func (r *Rig) startDrop(at DropPoint) error {
	kind, verdict, devices := ebpf.SchedCLS, int32(2), []string{NICDevice} // TC_ACT_SHOT
	attach := func(p *ebpf.Program, index int) (io.Closer, error) {
		return link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXIngress})
	}
	switch at {
	case AtUplink:
	case AtPorts:
		devices = nil
		for _, c := range r.Containers[1:] {
			devices = append(devices, PortPrefix+c.Name)
		}
		attach = func(p *ebpf.Program, index int) (io.Closer, error) {
			return link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXEgress})
		}
	case AtXDP:
		kind, verdict = ebpf.XDP, 1 // XDP_DROP
		attach = func(p *ebpf.Program, index int) (io.Closer, error) {
			return link.AttachXDP(link.XDPOptions{Interface: index, Program: p, Flags: link.XDPDriverMode})
		}
	default:
		return errors.New("no such place")
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_rig_drop", Type: kind, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer p.Close() // the links hold it
	ns, err := netdev.Open(r.Node.NetNS())
	if err != nil {
		return err
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	if err != nil {
		return err
	}
	for _, dev := range devices {
		found := false
		for _, l := range links {
			if l.Name != dev {
				continue
			}
			found = true
			err := ns.Do(func() error {
				c, err := attach(p, l.Index)
				if err == nil {
					r.dropping = append(r.dropping, c)
				}
				return err
			})
			if err != nil {
				return fmt.Errorf("%s: %w", dev, err)
			}
		}
		if !found {
			return fmt.Errorf("no device %s", dev)
		}
	}
	return nil
}

func (r *Rig) stopDrop() error {
	var errs []error
	for _, l := range r.dropping {
		errs = append(errs, l.Close())
	}
	r.dropping = nil
	return errors.Join(errs...)
}
