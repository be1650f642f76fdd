package traffic

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// programs classify packets: see traffic.bpf.c.
type programs struct {
	object *bpf.Object
	base
	v2   string                // root of the cgroup v2 tree; "": unknown
	past map[container.ID]bool // containers that send past their veths, see trust
}

// base is loaded at the start.
type base struct {
	Classes   *ebpf.Map      `ebpf:"fl_classes"`
	Normalise *ebpf.Program  `ebpf:"fl_normalise"`
	Strict    *ebpf.Variable `ebpf:"fl_strict"`
	Levels    *ebpf.Variable `ebpf:"fl_levels"`
	Epoch     *ebpf.Variable `ebpf:"fl_flow_epoch"`
}

// load loads the programs with the maps of identity. v2 is the root of the cgroup v2 tree. An error
// means that this kernel cannot run the programs.
func load(shared bpf.Maps, v2 string) (_ *programs, err error) {
	o, err := bpf.Open(name, loadTraffic, bpf.Vars{trafficVarFlSeed: rand.Uint64()}, shared)
	if err != nil {
		return nil, err
	}
	p := &programs{object: o, v2: v2, past: make(map[container.ID]bool)}
	if err := o.Load(&p.base, nil); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return p, nil
}

// copyFor returns a loader for a copy of a program. It sets the given variable, a slot or the index of
// an IFB, to number.
func (p *programs) copyFor(program, variable string, number uint32) func() (*bpf.Copy, error) {
	return func() (*bpf.Copy, error) { return p.object.Copy(program, bpf.Vars{variable: number}) }
}

// arrival is a program attached to what the sockets of a cgroup receive.
type arrival struct {
	link.Link
	copied *bpf.Copy
}

// attachCgroup attaches a program to what the sockets of a cgroup receive, beside other programs.
func attachCgroup(dir string, load func() (*bpf.Copy, error)) (*arrival, error) {
	p, err := load()
	if err != nil {
		return nil, err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupInetIngress, Program: p.Program})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach to cgroup %s: %w", dir, err), p.Close())
	}
	return &arrival{l, p}, nil
}

// Close detaches the program, if there is one.
func (a *arrival) Close() error {
	if a == nil {
		return nil
	}
	return errors.Join(bpf.Unlink(a.Link), a.copied.Close())
}

// detached reports whether a program was detached from its cgroup.
func (a *arrival) detached() bool {
	info, err := a.Info()
	return err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == 0
}

// forgetFlows makes the programs learn all flows anew.
func (p *programs) forgetFlows() error {
	var epoch uint32
	if err := p.Epoch.Get(&epoch); err != nil {
		return err
	}
	return p.Epoch.Set(epoch + 1)
}

// recognise makes the programs recognise sockets of a cgroup by its depth in the tree. A cgroup deeper
// than that is recognised without its children.
func (p *programs) recognise(dir string) error {
	const deeper, most = 31, 8
	level := p.level(dir)
	if level < 1 || level > most {
		level = deeper
	}
	var levels uint32
	if err := p.Levels.Get(&levels); err != nil {
		return err
	}
	return p.Levels.Set(levels | 1<<level)
}

// level returns the depth of a cgroup in the v2 tree; 0 if it is outside.
func (p *programs) level(dir string) int {
	rel, err := filepath.Rel(p.v2, dir)
	if p.v2 == "" || err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return 0
	}
	return strings.Count(rel, "/") + 1
}

// setClass assigns a class to packets from a tenant's sockets; Nobody: none.
func (p *programs) setClass(tenant, class identity.Slot) error {
	return p.Classes.Put(uint32(tenant), uint32(class))
}

// unseen reports whether packets of a kind of device bypass all other host devices on the way to the
// uplink.
func unseen(kind string) bool { return kind == "macvlan" || kind == "ipvlan" }

// trust records whether a container sends past its veths. While any container does, a packet may
// identify itself only if a device received it or a known socket sent it.
func (p *programs) trust(id container.ID, past bool) error {
	delete(p.past, id)
	strict := uint32(0)
	if past {
		p.past[id] = true
	}
	if len(p.past) > 0 {
		strict = 1
	}
	return p.Strict.Set(strict)
}
