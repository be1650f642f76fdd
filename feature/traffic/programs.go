package traffic

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// programs classify packets: see traffic.bpf.c.
type programs struct {
	object *bpf.Object
	base
}

// base is loaded at the start.
type base struct {
	Paths     *ebpf.Map      `ebpf:"fl_paths"`
	Classes   *ebpf.Map      `ebpf:"fl_classes"`
	Normalise *ebpf.Program  `ebpf:"fl_normalise"`
	Strict    *ebpf.Variable `ebpf:"fl_strict"`
	Levels    *ebpf.Variable `ebpf:"fl_levels"`
	Epoch     *ebpf.Variable `ebpf:"fl_flow_epoch"`
}

// load loads the programs with the maps of identity. An error means that this kernel cannot run
// them.
func load(shared bpf.Maps) (_ *programs, err error) {
	o, err := bpf.Open(name, loadTraffic, bpf.Vars{trafficVarFlSeed: rand.Uint64()}, shared)
	if err != nil {
		return nil, err
	}
	p := &programs{object: o}
	if err := o.Load(&p.base, nil); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return p, nil
}

// copyFor returns a loader of the copy of a program for one slot.
func (p *programs) copyFor(program string, s identity.Slot) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		return p.object.Program(program, bpf.Vars{trafficVarFlSlot: uint32(s)})
	}
}

// leading returns a loader of the copy of a program that redirects to the IFB with an index.
func (p *programs) leading(program string, ifb int) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		return p.object.Program(program, bpf.Vars{trafficVarFlIfb: uint32(ifb)})
	}
}

// attachCgroup attaches a program to what the sockets of a cgroup receive, beside other programs.
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

// put attaches a program at a device.
func (f *Traffic) put(s *hook.Set, at hook.Place, load func() (*ebpf.Program, error)) error {
	at.Owner = journal.Owner{Feature: name}
	return s.Put(f.cfg.Ends, at, load)
}

// classify identifies what a container's sockets send by its cgroup, and assigns it a class.
func (f *Traffic) classify(t *tenant, c container.Container, class identity.Slot) error {
	_, err := f.cfg.Identity.Tell(name, identity.Member{ID: c.ID, Tenant: t.key, Cgroups: []uint64{uint64(c.ID)}})
	if err := errors.Join(err, f.programs.setClass(t.slot, class)); err != nil {
		return fmt.Errorf("tell packets by cgroup %d: %w", c.ID, err)
	}
	// A deeper cgroup is recognised only itself, not with the cgroups below it.
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

// setClass assigns a class to what the sockets of a tenant send; Nobody: none.
func (p *programs) setClass(tenant, class identity.Slot) error {
	return p.Classes.Put(uint32(tenant), uint32(class))
}

// setStrict sets whether packets that neither a device received nor a known socket sent may
// identify themselves.
func (p *programs) setStrict(on bool) error {
	return set(p.Strict, on)
}

func (p *programs) close() error { return errors.Join(p.Normalise.Close(), p.object.Close()) }
