package traffic

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// programs are what tells packets apart: see traffic.bpf.c.
type programs struct {
	spec      *ebpf.CollectionSpec
	cgroups   *ebpf.Map
	told      *ebpf.Map // fl_paths
	variables *ebpf.Map // those that change: .bss
	normalise *ebpf.Program
	strict    *ebpf.Variable
	levels    *ebpf.Variable
	epoch     *ebpf.Variable

	flows *flows // nil until what uplinks receive is to be shared
}

// flows are what tells received packets apart.
type flows struct {
	where, pending, told *ebpf.Map
}

// load loads the programs. An error means that this kernel cannot run them.
// mask is the part of the mark that may carry the slot, 0 for none.
func load(mask uint32) (_ *programs, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	spec, err := loadTraffic()
	if err != nil {
		return nil, err
	}
	shift, err := slot.MarkShift(mask)
	if err != nil {
		return nil, fmt.Errorf("mask of the mark: %w", err)
	}
	for name, v := range map[string]any{"fl_mark_mask": mask, "fl_mark_shift": uint32(shift), "fl_seed": rand.Uint64()} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, err
		}
	}
	var objs struct {
		Cgroups   *ebpf.Map      `ebpf:"fl_cgroups"`
		Told      *ebpf.Map      `ebpf:"fl_paths"`
		Bss       *ebpf.Map      `ebpf:".bss"`
		Normalise *ebpf.Program  `ebpf:"fl_normalise"`
		Strict    *ebpf.Variable `ebpf:"fl_strict"`
		Levels    *ebpf.Variable `ebpf:"fl_levels"`
		Epoch     *ebpf.Variable `ebpf:"fl_epoch"`
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return nil, err
	}
	return &programs{
		spec: spec, cgroups: objs.Cgroups, told: objs.Told, variables: objs.Bss, normalise: objs.Normalise,
		strict: objs.Strict, levels: objs.Levels, epoch: objs.Epoch,
	}, nil
}

// identity loads the copy of fl_identify for one slot.
func (p *programs) identity(s slot.Slot) (*ebpf.Program, error) {
	spec := p.spec.Copy()
	if err := spec.Variables["fl_slot"].Set(uint32(s)); err != nil {
		return nil, err
	}
	var objs struct {
		Identify *ebpf.Program `ebpf:"fl_identify"`
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return nil, fmt.Errorf("load identity of slot %d: %w", s, err)
	}
	return objs.Identify, nil
}

// inbound loads the copy of fl_inbound that leads to the IFB with an index.
func (p *programs) inbound(ifb int) (*ebpf.Program, error) {
	spec, options, err := p.sharing()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["fl_ifb"].Set(uint32(ifb)); err != nil {
		return nil, err
	}
	var objs struct {
		Inbound *ebpf.Program `ebpf:"fl_inbound"`
	}
	if err := spec.LoadAndAssign(&objs, options); err != nil {
		return nil, fmt.Errorf("tell received packets apart: %w", err)
	}
	return objs.Inbound, nil
}

// lead loads the copy of fl_lead that leads to the IFB with an index.
func (p *programs) lead(ifb int) (*ebpf.Program, error) {
	spec := p.spec.Copy()
	if err := spec.Variables["fl_ifb"].Set(uint32(ifb)); err != nil {
		return nil, err
	}
	var objs struct {
		Lead *ebpf.Program `ebpf:"fl_lead"`
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return nil, fmt.Errorf("lead packets to a queue: %w", err)
	}
	return objs.Lead, nil
}

// delivery loads the copies of fl_deliver and fl_arrive for one slot.
func (p *programs) delivery(s slot.Slot) (*delivery, error) {
	spec, options, err := p.sharing()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["fl_slot"].Set(uint32(s)); err != nil {
		return nil, err
	}
	d := new(delivery)
	if err := spec.LoadAndAssign(d, options); err != nil {
		return nil, fmt.Errorf("learn what slot %d receives: %w", s, err)
	}
	return d, nil
}

// delivery is what learns which flows are one tenant's.
type delivery struct {
	Device *ebpf.Program `ebpf:"fl_deliver"`
	Socket *ebpf.Program `ebpf:"fl_arrive"`
}

func (d *delivery) close() error { return errors.Join(d.Device.Close(), d.Socket.Close()) }

// attachCgroup attaches a program to what the sockets of a cgroup receive,
// beside whatever else is there.
func attachCgroup(dir string, p *ebpf.Program) (link.Link, error) {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupInetIngress, Program: p})
	if err != nil {
		return nil, fmt.Errorf("attach to cgroup %s: %w", dir, err)
	}
	return l, nil
}

// sharing makes the maps by which received packets are told apart, and gives
// what a program that uses them is loaded with.
func (p *programs) sharing() (*ebpf.CollectionSpec, *ebpf.CollectionOptions, error) {
	if p.flows == nil {
		var objs struct {
			Flows   *ebpf.Map `ebpf:"fl_flows"`
			Pending *ebpf.Map `ebpf:"fl_pending"`
			Told    *ebpf.Map `ebpf:"fl_inpaths"`
		}
		if err := p.spec.Copy().LoadAndAssign(&objs, nil); err != nil {
			return nil, nil, fmt.Errorf("make the maps of flows: %w", err)
		}
		p.flows = &flows{where: objs.Flows, pending: objs.Pending, told: objs.Told}
	}
	return p.spec.Copy(), &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		trafficMapFlCgroups: p.cgroups, trafficMapFlFlows: p.flows.where, trafficMapFlPending: p.flows.pending,
		trafficMapFlInpaths: p.flows.told, ".bss": p.variables,
	}}, nil
}

// forgetFlows has all flows learnt anew.
func (p *programs) forgetFlows() error {
	var epoch uint32
	if err := p.epoch.Get(&epoch); err != nil {
		return err
	}
	return p.epoch.Set(epoch + 1)
}

func set(v *ebpf.Variable, on bool) error {
	n := uint32(0)
	if on {
		n = 1
	}
	return v.Set(n)
}

// put has a program at a hook: it attaches it, or sees that it is still there.
// Programs come first, as one that redirects would keep packets from those
// behind it.
func (f *Traffic) put(a **qdisc.Attachment, at qdisc.Hook, p *ebpf.Program) (err error) {
	if *a != nil {
		return (*a).Hold()
	}
	*a, err = f.hooks.Attach(at, p, journal.Owner{Feature: name})
	return err
}

// cgroup has packets of the sockets of a container told by its cgroup, which
// lies at a level below the root of the v2 tree.
func (p *programs) cgroup(id container.ID, level int, s slot.Slot) error {
	if err := p.cgroups.Put(uint64(id), uint32(s)); err != nil {
		return fmt.Errorf("tell packets by cgroup %d: %w", id, err)
	}
	// A cgroup that lies deeper is told by itself alone, not by what is below.
	const deeper, most = 31, 8
	if level < 1 || level > most {
		level = deeper
	}
	var levels uint32
	if err := p.levels.Get(&levels); err != nil {
		return err
	}
	return p.levels.Set(levels | 1<<level)
}

// forget undoes cgroup.
func (p *programs) forget(id container.ID) error {
	if err := p.cgroups.Delete(uint64(id)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// setStrict says whether packets that no device received, and that no known
// socket sent, may say themselves whose they are.
func (p *programs) setStrict(on bool) error {
	return set(p.strict, on)
}

// told lists what fl_paths counts, in its order.
func told() []string {
	return []string{"priority", "mark", "socket", "nobody", "forged"}
}

// paths reads how packets at uplinks were told apart.
func (p *programs) paths() (map[string]uint64, error) { return counted(p.told, told()) }

// inpaths reads the same of what uplinks received; nil while nobody shares that.
func (p *programs) inpaths() (map[string]uint64, error) {
	if p.flows == nil {
		return nil, nil
	}
	return counted(p.flows.told, []string{"flow", "new", "none"})
}

// counted reads a per-CPU array of counters.
func counted(m *ebpf.Map, names []string) (map[string]uint64, error) {
	out := make(map[string]uint64)
	for i, name := range names {
		var each []uint64
		if err := m.Lookup(uint32(i), &each); err != nil {
			return nil, err
		}
		for _, n := range each {
			out[name] += n
		}
	}
	return out, nil
}

func (p *programs) close() error {
	errs := []error{p.normalise.Close(), p.cgroups.Close(), p.told.Close(), p.variables.Close()}
	if f := p.flows; f != nil {
		errs = append(errs, f.where.Close(), f.pending.Close(), f.told.Close())
	}
	return errors.Join(errs...)
}
