package traffic

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// programs are what tells packets apart: see traffic.bpf.c.
type programs struct {
	spec      *ebpf.CollectionSpec
	maps      trafficMaps
	normalise *ebpf.Program
	strict    *ebpf.Variable
	levels    *ebpf.Variable
}

// load loads the programs. An error means that this kernel cannot run them.
// mask is the part of the mark that may carry the slot, 0 for none.
func load(mask uint32, tcIndex bool) (_ *programs, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	spec, err := loadTraffic()
	if err != nil {
		return nil, err
	}
	shift := uint32(bits.TrailingZeros32(mask))
	if mask != 0 && mask>>shift != math.MaxUint16 {
		return nil, fmt.Errorf("mask %#x of the mark is not 16 bits in a row", mask)
	}
	use := uint32(0)
	if tcIndex {
		use = 1
	}
	for name, v := range map[string]uint32{"fl_mark_mask": mask, "fl_mark_shift": shift & 31, "fl_tc_index": use} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, err
		}
	}
	var objs struct {
		trafficMaps
		Normalise *ebpf.Program  `ebpf:"fl_normalise"`
		Strict    *ebpf.Variable `ebpf:"fl_strict"`
		Levels    *ebpf.Variable `ebpf:"fl_levels"`
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return nil, err
	}
	p := &programs{spec: spec, maps: objs.trafficMaps, normalise: objs.Normalise, strict: objs.Strict, levels: objs.Levels}
	// Whether tcx is there is found out by a device that there cannot be.
	_, err = link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: p.normalise, Attach: ebpf.AttachTCXEgress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
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

// attach puts a program first on a device, as one that redirects would keep
// packets from those behind it.
func attach(ns *netdev.NS, index int, p *ebpf.Program, to ebpf.AttachType) (l link.Link, err error) {
	err = ns.Do(func() error {
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: to, Anchor: link.Head()})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("attach to device %d in netns %d: %w", index, ns.Inode(), err)
	}
	return l, nil
}

// cgroup has packets of the sockets of a container told by its cgroup, which
// lies at a level below the root of the v2 tree.
func (p *programs) cgroup(id container.ID, level int, s slot.Slot) error {
	if err := p.maps.FlCgroups.Put(uint64(id), uint32(s)); err != nil {
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
	if err := p.maps.FlCgroups.Delete(uint64(id)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// setStrict says whether packets that no device received, and that no known
// socket sent, may say themselves whose they are.
func (p *programs) setStrict(on bool) error {
	v := uint32(0)
	if on {
		v = 1
	}
	return p.strict.Set(v)
}

// told lists what fl_paths counts, in its order.
func told() []string {
	return []string{"priority", "mark", "tc_index", "socket", "nobody", "forged"}
}

// paths reads how packets at uplinks were told apart.
func (p *programs) paths() (map[string]uint64, error) {
	out := make(map[string]uint64)
	for i, name := range told() {
		var each []uint64
		if err := p.maps.FlPaths.Lookup(uint32(i), &each); err != nil {
			return nil, err
		}
		for _, n := range each {
			out[name] += n
		}
	}
	return out, nil
}

func (p *programs) close() error {
	return errors.Join(p.normalise.Close(), p.maps.Close())
}
