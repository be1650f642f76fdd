package traffic

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// programs identify packets: see traffic.bpf.c.
type programs struct {
	object *bpf.Object
	base
}

// base is loaded from the beginning.
type base struct {
	Paths     *ebpf.Map      `ebpf:"fl_paths"`
	Normalise *ebpf.Program  `ebpf:"fl_normalise"`
	Strict    *ebpf.Variable `ebpf:"fl_strict"`
	Levels    *ebpf.Variable `ebpf:"fl_levels"`
	Epoch     *ebpf.Variable `ebpf:"fl_flow_epoch"`
}

// load loads the programs. An error means that this kernel cannot run them.
// mask is the part of the mark that may carry the slot, 0 for none; shared are the maps
// of identity.
func load(mask uint32, shared bpf.Maps) (_ *programs, err error) {
	shift, err := identity.MarkShift(mask)
	if err != nil {
		return nil, fmt.Errorf("mask of the mark: %w", err)
	}
	o, err := bpf.Open(name, loadTraffic, bpf.Vars{
		trafficVarFlMarkMask: mask, trafficVarFlMarkShift: uint32(shift), trafficVarFlSeed: rand.Uint64(),
	}, shared)
	if err != nil {
		return nil, err
	}
	p := &programs{object: o}
	if err := o.Load(&p.base, nil); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return p, nil
}

// copyFor gives what loads the copy of a program for one slot.
func (p *programs) copyFor(program string, s identity.Slot) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		return p.object.Program(program, bpf.Vars{trafficVarFlSlot: uint32(s)})
	}
}

// leading gives what loads the copy of a program that leads to the IFB with an index.
func (p *programs) leading(program string, ifb int) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		return p.object.Program(program, bpf.Vars{trafficVarFlIfb: uint32(ifb)})
	}
}

// attachCgroup attaches a program to what the sockets of a cgroup receive,
// beside whatever else is there.
func attachCgroup(dir string, load func() (*ebpf.Program, error)) (link.Link, error) {
	p, err := load()
	if err != nil {
		return nil, err
	}
	defer p.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupInetIngress, Program: p})
	if err != nil {
		return nil, fmt.Errorf("attach to cgroup %s: %w", dir, err)
	}
	return l, nil
}

// forgetFlows makes the programs learn all flows again.
func (p *programs) forgetFlows() error {
	var epoch uint32
	if err := p.Epoch.Get(&epoch); err != nil {
		return err
	}
	return p.Epoch.Set(epoch + 1)
}

func set(v *ebpf.Variable, on bool) error {
	n := uint32(0)
	if on {
		n = 1
	}
	return v.Set(n)
}

// put sees to it that a program is at a device.
func (f *Traffic) put(s *ends.Set, at ends.Place, load func() (*ebpf.Program, error)) error {
	at.Owner = journal.Owner{Feature: name}
	return s.Put(f.cfg.Ends, at, load)
}

// classify has packets of the sockets of one of a tenant's containers told by its
// cgroup, and put into a class.
func (f *Traffic) classify(t *tenant, c container.Container, class identity.Slot) error {
	_, err := f.cfg.Identity.Tell(name, identity.Member{ID: c.ID, Tenant: t.key, Cgroups: []uint64{uint64(c.ID)}, Class: class})
	if err != nil {
		return fmt.Errorf("tell packets by cgroup %d: %w", c.ID, err)
	}
	// A cgroup that is deeper is recognised only by itself, not by the cgroups
	// below it.
	const deeper, most = 31, 8
	level := f.level(c.Cgroup.V2) // below the root of the v2 tree
	if level < 1 || level > most {
		level = deeper
	}
	var levels uint32
	if err := f.programs.Levels.Get(&levels); err != nil {
		return err
	}
	return f.programs.Levels.Set(levels | 1<<level)
}

// setStrict says whether packets that no device received, and that no known
// socket sent, may identify themselves.
func (p *programs) setStrict(on bool) error {
	return set(p.Strict, on)
}

func (p *programs) close() error { return errors.Join(p.Normalise.Close(), p.object.Close()) }
