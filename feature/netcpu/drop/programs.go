// Package drop drops packets for a container that has no time for them, where they
// enter the host: by tc or in the driver of an uplink, and at the host end of the
// container's veth. drop.bpf.c says how. The package decides nothing about which
// container that is: package isolate and package netcpu do.
//
// Nothing here but what says so is safe for concurrent use; package netcpu holds its
// lock. All that is attached does nothing any more once this process has ended.
package drop

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// errSlots means that as many tenants are isolated as the BPF maps hold.
var errSlots = errors.New("early drop: no slot is free")

// Config is what Load needs.
type Config struct {
	Feature string // the owner of the notes
	Hooks   *qdisc.Hooks

	// Maps of package account: the charges that limits are held against, and whose
	// packet a drop ended. Nil is one in which nothing is ever charged, and one that
	// nobody reads.
	Charges, Dropped *ebpf.Map
	// Charger loads what charges the packets that XDP drops; see account.Meter.Taker.
	// Nil without accounts.
	Charger func(frags bool) (*ebpf.Program, error)
}

// Programs are the programs with their maps, and what is attached at no one place.
type Programs struct {
	cfg     Config
	object  *bpf.Object
	maps    dropMaps
	tc      *ebpf.Program
	charges bool // what XDP drops is charged

	polled bpf.Links       // fl_polled, while there is a tenant
	used   map[uint32]bool // slots of tenants
	next   uint32          // the slot to try first
}

// Load loads the programs. An error means that this kernel cannot run them.
func Load(cfg Config) (_ *Programs, err error) {
	p := &Programs{cfg: cfg, used: make(map[uint32]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("early drop: %w", err), p.Close())
		}
	}()
	var shared bpf.Maps
	if cfg.Charges != nil {
		shared = bpf.Maps{dropMapFlCharges: cfg.Charges, dropMapFlDropped: cfg.Dropped}
	}
	if p.object, err = bpf.Open(cfg.Feature, loadDrop, nil, shared); err != nil {
		return nil, err
	}
	// Whether the other programs work is found out now, not at the first container.
	var objs struct {
		dropMaps
		Polled *ebpf.Program `ebpf:"fl_polled"`
		Count  *ebpf.Program `ebpf:"fl_count"`
		Drop   *ebpf.Program `ebpf:"fl_drop_tc"`
	}
	if err := p.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	p.maps, p.tc = objs.dropMaps, objs.Drop
	return p, errors.Join(objs.Polled.Close(), objs.Count.Close())
}

// Close ends all that is attached, but for what tenants and points hold.
func (p *Programs) Close() error {
	if p == nil {
		return nil
	}
	return errors.Join(p.polled.Close(), p.tc.Close(), p.object.Close())
}

// Maps says how full the maps are.
func (p *Programs) Maps() []bpf.Usage { return p.object.Usage() }

// Add begins to count what waits for a tenant, at the expense of owner, which also
// owns the notes. The tenant's devices follow with CountVeths.
func (p *Programs) Add(owner container.ID) (*Tenant, error) {
	most := p.maps.FlTenants.MaxEntries()
	if len(p.used) >= int(most) {
		return nil, errSlots
	}
	// Not the one that was left last: what was learnt of its addresses counts for
	// a while, and they may be anybody's by now.
	slot := p.next % most
	for p.used[slot] {
		slot = (slot + 1) % most
	}
	p.next = slot + 1
	// What an earlier tenant left in the slot.
	if err := p.maps.FlTenants.Put(slot, dropTenant{}); err != nil {
		return nil, fmt.Errorf("early drop: clear slot %d: %w", slot, err)
	}
	if p.polled == nil {
		links, err := p.object.Attach(dropProgFlPolled)
		if err != nil {
			return nil, fmt.Errorf("early drop: watch polls: %w", err)
		}
		p.polled = links
	}
	p.used[slot] = true
	return &Tenant{programs: p, slot: slot, links: make(map[dropDevice]*qdisc.Attachment), owner: owner}, nil
}

// attachTC begins to drop at an uplink, by tc.
func (p *Programs) attachTC(ns *netdev.NS, index int) (*qdisc.Attachment, error) {
	a, err := p.cfg.Hooks.Attach(qdisc.Hook{NS: ns, Index: index, Name: "drop"}, p.tc, journal.Owner{Feature: p.cfg.Feature})
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	return a, nil
}

// Nobody is the slot of a queue that brings no tenant's packets alone.
const Nobody = ^uint32(0)

// Queue is what a receive queue of an uplink has brought, in packets.
type Queue struct {
	Own    uint64 // for the same tenant as the one before
	Others uint64 // for somebody else than the one before
	Stale  uint64 // to an address that was a tenant's before a pause
	Slot   uint32 // the tenant of the last one, or Nobody
}

// CountQueue begins to count what the queue brings that a NAPI polls.
func (p *Programs) CountQueue(napi int) error {
	if err := p.maps.FlQueues.Put(uint32(napi), dropQueue{Slot: Nobody}); err != nil {
		return fmt.Errorf("count what the queue of napi %d brings: %w", napi, err)
	}
	return nil
}

// Queue returns those counters.
func (p *Programs) Queue(napi int) (Queue, error) {
	var q dropQueue
	if err := p.maps.FlQueues.Lookup(uint32(napi), &q); err != nil {
		return Queue{}, fmt.Errorf("read what the queue of napi %d brought: %w", napi, err)
	}
	return Queue{Own: q.Own, Others: q.Others, Stale: q.Stale, Slot: q.Slot}, nil
}

// ForgetQueue ends it.
func (p *Programs) ForgetQueue(napi int) error {
	if err := p.maps.FlQueues.Delete(uint32(napi)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
