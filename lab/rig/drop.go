package rig

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Drop starts or stops to drop all packets from outside, by XDP at the NIC of the path NIC. A real
// NIC is polled on the CPU of its interrupt; this one, a veth, is polled on the sender's CPU, and so
// is its XDP. It therefore stands for a drop that costs the containers' CPU nothing, such as one in
// hardware.
func (r *Rig) Drop(on bool) error {
	err := r.stopDrop()
	if err == nil && on {
		err = r.startDrop()
	}
	if err != nil {
		return fmt.Errorf("drop what comes by %s: %w", NICDevice, err)
	}
	return nil
}

func (r *Rig) startDrop() error {
	const drop = 1 // XDP_DROP
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_rig_drop", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, drop), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer p.Close() // the link holds it
	index, err := indexOf(r.Node, NICDevice)
	if err != nil {
		return err
	}
	return r.Node.Do(func() (err error) {
		r.dropping, err = link.AttachXDP(link.XDPOptions{Interface: index, Program: p, Flags: link.XDPDriverMode})
		return err
	})
}

func (r *Rig) stopDrop() error {
	if r.dropping == nil {
		return nil
	}
	err := r.dropping.Close()
	r.dropping = nil
	return err
}

// indexOf returns the index of a device.
func indexOf(box *sandbox.Box, dev string) (index int, err error) {
	err = box.Change(dev, func(_ *netlink.Handle, link netlink.Link) error {
		index = link.Attrs().Index
		return nil
	})
	return index, err
}
