package netcpu

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// errSlots means that as many tenants are isolated as the BPF maps hold.
var errSlots = errors.New("early drop: no slot is free")

// early drops packets at the uplinks while their container cannot take them;
// netcpu.bpf.c says how. All that it attaches does nothing any more once this
// process has ended.
type early struct {
	hooks  *qdisc.Hooks
	object *bpf.Object
	maps   netcpuMaps
	drop   *ebpf.Program
	taker  taker // nil without accounts, and once it has been called

	watch bpf.Links       // fl_polled, while there is a tenant
	used  map[uint32]bool // slots of tenants
	next  uint32          // the slot to try first
}

// watched is what early holds for one tenant.
type watched struct {
	slot  uint32
	links map[netcpuDevice]*qdisc.Attachment // by the container's end of the veth
	payer container.ID
}

// at is what watches a device, nil for one that is not watched.
func (w *watched) at(inside *netdev.NS, index int) *qdisc.Attachment {
	return w.links[netcpuDevice{Netns: uint32(inside.Inode()), Ifindex: uint32(index)}]
}

// newEarly loads the programs. charges is the map of package account that limits
// are held against, and dropped its map of whose packet a drop ended; nil is one
// in which nothing is ever charged, and one that nobody reads. An error means
// that this kernel cannot run them.
func newEarly(hooks *qdisc.Hooks, charges, dropped *ebpf.Map) (_ *early, err error) {
	e := &early{hooks: hooks, used: make(map[uint32]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("early drop: %w", err), e.close())
		}
	}()
	var shared bpf.Maps
	if charges != nil {
		shared = bpf.Maps{netcpuMapFlCharges: charges, netcpuMapFlDropped: dropped}
	}
	if e.object, err = bpf.Open(name, loadNetcpu, nil, shared); err != nil {
		return nil, err
	}
	// Whether the other programs work is found out now, not at the first container.
	var objs struct {
		netcpuMaps
		Polled *ebpf.Program `ebpf:"fl_polled"`
		Count  *ebpf.Program `ebpf:"fl_count"`
		Drop   *ebpf.Program `ebpf:"fl_drop_tc"`
	}
	if err := e.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	e.maps, e.drop = objs.netcpuMaps, objs.Drop
	return e, errors.Join(objs.Polled.Close(), objs.Count.Close())
}

// counter loads a copy of fl_count, for the veth of the tenant in a slot whose
// container's end has this address.
func (e *early) counter(slot uint32, mac net.HardwareAddr) (*ebpf.Program, error) {
	p, err := e.object.Program(netcpuProgFlCount, bpf.Vars{netcpuVarFlTenantSlot: slot, netcpuVarFlTenantMac: [6]byte(mac)})
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	return p, nil
}

// add begins to count what waits for a tenant, at the expense of payer. The
// tenant's devices follow with device.
func (e *early) add(payer container.ID) (*watched, error) {
	most := e.maps.FlTenants.MaxEntries()
	if len(e.used) >= int(most) {
		return nil, errSlots
	}
	// Not the one that was left last: what was learnt of its addresses counts for
	// a while, and they may be anybody's by now.
	slot := e.next % most
	for e.used[slot] {
		slot = (slot + 1) % most
	}
	e.next = slot + 1
	// What an earlier tenant left in the slot.
	if err := e.maps.FlTenants.Put(slot, netcpuTenant{}); err != nil {
		return nil, fmt.Errorf("early drop: clear slot %d: %w", slot, err)
	}
	if e.watch == nil {
		watch, err := e.object.Attach(netcpuProgFlPolled)
		if err != nil {
			return nil, fmt.Errorf("early drop: watch polls: %w", err)
		}
		e.watch = watch
	}
	e.used[slot] = true
	return &watched{slot: slot, links: make(map[netcpuDevice]*qdisc.Attachment), payer: payer}, nil
}

// device counts one veth of a tenant: inside is the container's end, host the
// other one.
func (e *early) device(w *watched, inside *netdev.NS, index int, host *netdev.NS, hostIndex int) error {
	own, err := inside.Link(index)
	if err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	mac, err := net.ParseMAC(own.MAC)
	if err != nil {
		return fmt.Errorf("early drop: address of device %d in netns %d: %w", index, inside.Inode(), err)
	}
	count, err := e.counter(w.slot, mac)
	if err != nil {
		return err
	}
	defer count.Close() // what it is attached to holds it
	key := netcpuDevice{Netns: uint32(inside.Inode()), Ifindex: uint32(index)}
	if err := e.maps.FlDevices.Put(key, w.slot); err != nil {
		return fmt.Errorf("early drop: watch polls of device %d in netns %d: %w", index, inside.Inode(), err)
	}
	// Containers of a pod that are charged have a program each.
	at := qdisc.Hook{NS: host, Index: hostIndex, Egress: true, Last: true, Name: "count_" + w.payer.String()}
	l, err := e.hooks.Attach(at, count, journal.Owner{Feature: name, Container: uint64(w.payer)})
	if err != nil {
		return errors.Join(fmt.Errorf("early drop: %w", err), e.maps.FlDevices.Delete(key))
	}
	w.links[key] = l
	return nil
}

// uplink begins to drop at a device, by tc.
func (e *early) uplink(ns *netdev.NS, index int) (*qdisc.Attachment, error) {
	a, err := e.hooks.Attach(qdisc.Hook{NS: ns, Index: index, Name: "drop"}, e.drop, journal.Owner{Feature: name})
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	return a, nil
}

// watchQueue begins to count what the queue brings that a NAPI polls.
func (e *early) watchQueue(napi int) error {
	if err := e.maps.FlQueues.Put(uint32(napi), netcpuQueue{Slot: nobody}); err != nil {
		return fmt.Errorf("watch queue of napi %d: %w", napi, err)
	}
	return nil
}

// queue returns those counters.
func (e *early) queue(napi int) (netcpuQueue, error) {
	var q netcpuQueue
	if err := e.maps.FlQueues.Lookup(uint32(napi), &q); err != nil {
		return q, fmt.Errorf("read queue of napi %d: %w", napi, err)
	}
	return q, nil
}

// unwatchQueue ends it.
func (e *early) unwatchQueue(napi int) error {
	if err := e.maps.FlQueues.Delete(uint32(napi)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// remove ends what add and device began. It goes on after a failure.
func (e *early) remove(w *watched) error {
	errs := []error{e.keep(w, nil)}
	// The drop in a driver goes on, and nobody counts any more what leaves the ring.
	errs = append(errs, e.maps.FlTenants.Put(w.slot, netcpuTenant{}))
	delete(e.used, w.slot)
	if len(e.used) == 0 && e.watch != nil {
		errs = append(errs, e.watch.Close())
		e.watch = nil
	}
	return errors.Join(errs...)
}

// ring says whether a tenant's packets go through the ring of its veth, so that
// it can be full. The counters of packets go on.
func (e *early) ring(w *watched, used bool) error {
	return e.change(w, func(t *netcpuTenant) {
		t.NoRing = 1
		if used {
			t.NoRing = 0
			t.Polled = t.Sent // what came meanwhile did not go into it
		}
	})
}

// bill says in which account, by its slot, what a packet has cost that is dropped
// for a tenant's sake; 0 is the system's.
func (e *early) bill(w *watched, slot uint32) error {
	if t, err := e.read(w); err == nil && t.Account == slot {
		return nil // a write can lose what happens meanwhile
	}
	return e.change(w, func(t *netcpuTenant) { t.Account = slot })
}

// limit drops a tenant's packets once its charges have reached a sum, in ns, for
// so long from now. It has to be renewed: without an agent there is no limit.
// slot is the tenant's in the map of charges.
func (e *early) limit(w *watched, slot uint32, sum int64, last time.Duration) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return e.change(w, func(t *netcpuTenant) {
		t.Account, t.Limit = slot, sum
		t.Until = uint64(now.Nano() + last.Nanoseconds())
	})
}

// unlimited ends that.
func (e *early) unlimited(w *watched) error {
	return e.change(w, func(t *netcpuTenant) { t.Until = 0 })
}

// change writes a part of a tenant's entry. An event that comes between reading
// and writing is lost to the counters; the next poll that empties the ring sets
// right what matters.
func (e *early) change(w *watched, by func(*netcpuTenant)) error {
	t, err := e.read(w)
	if err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	by(&t)
	if err := e.maps.FlTenants.Put(w.slot, t); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

// read returns a tenant's counters.
func (e *early) read(w *watched) (netcpuTenant, error) {
	var t netcpuTenant
	err := e.maps.FlTenants.Lookup(w.slot, &t)
	return t, err
}

func (e *early) close() error {
	return errors.Join(e.watch.Close(), e.drop.Close(), e.object.Close())
}
