package drop

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant"
)

// Drops is the early drop of one tenant. It counts the tenant's packets, and drops them while the payer
// has no time for them. It lasts until End, even if the payer leaves the tenant.
type Drops struct {
	dropper *Dropper
	key     tenant.Key
	Slot    uint32                    // slot of the tenant, as in Queue
	counts  hook.Set                  // programs at the host ends of its veths
	veths   map[container.Device]veth // by host end
	payer   container.ID              // owner of the journal entries
	charged bool                      // payer is charged, not isolated
}

// veth is a veth of a tenant whose packets are counted.
type veth struct {
	*counter
	inside dropFlDevice // container's end, a key of fl_counted
}

// add starts to count for a tenant. countVeths then adds the tenant's devices.
func (d *Dropper) add(key tenant.Key, payer container.ID) (_ *Drops, err error) {
	t := &Drops{dropper: d, key: key, payer: payer, veths: make(map[container.Device]veth)}
	slot, err := d.cfg.Identity.Take(t.key)
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	defer func() {
		if err != nil {
			d.cfg.Identity.Release(t.key)
			err = fmt.Errorf("early drop: %w", err)
		}
	}()
	if t.Slot = uint32(slot); t.Slot >= d.maps.FlTenants.MaxEntries() {
		return nil, fmt.Errorf("%w: %d", errSlots, t.Slot)
	}
	// An earlier tenant of the slot may have left counters.
	if err := d.maps.FlTenants.Put(t.Slot, dropTenant{}); err != nil {
		return nil, fmt.Errorf("clear slot %d: %w", t.Slot, err)
	}
	if d.polled == nil {
		links, err := bpf.Attach(d.poll)
		if err != nil {
			return nil, fmt.Errorf("watch polls: %w", err)
		}
		d.polled = links
	}
	d.counted++
	return t, nil
}

// close undoes add and countVeths. It continues after an error.
func (t *Drops) close() error {
	d := t.dropper
	errs := []error{t.keep(nil)}
	// Clear the entry: a driver drops by it even now that the ring is no longer counted.
	errs = append(errs, d.maps.FlTenants.Put(t.Slot, dropTenant{}))
	if d.counted--; d.counted == 0 {
		errs = append(errs, d.polled.Close())
		d.polled = nil
	}
	d.cfg.Identity.Release(t.key)
	return errors.Join(errs...)
}

// countVeths counts packets into the veths of c and no others. inside is its network namespace.
func (t *Drops) countVeths(inside *netdev.NS, c container.Container) error {
	var ends []container.End
	want := make(map[container.Device]dropFlDevice)
	for _, e := range c.Ends("") {
		if e.Inside.HasHostEnd() {
			ends = append(ends, e)
			want[e.Device] = dropFlDevice{Netns: uint32(inside.Inode()), Ifindex: uint32(e.Inside.Index)}
		}
	}
	if err := t.keep(want); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	for _, e := range ends {
		if err := t.countVeth(inside, e, want[e.Device]); err != nil {
			return fmt.Errorf("early drop: count at device %d in netns %d: %w", e.Index, e.NetNS, err)
		}
	}
	return nil
}

// keep stops counting at veths that are not in want, which maps host ends to the containers' ends.
func (t *Drops) keep(want map[container.Device]dropFlDevice) error {
	gone := func(d container.Device, _ bool, _ string) bool { return want[d] != t.veths[d].inside }
	errs := []error{t.counts.Drop(gone)}
	for d, v := range t.veths {
		if gone(d, true, "") {
			delete(t.veths, d)
			errs = append(errs, t.dropper.tell(v.counter, d, dropVeth{}), t.dropper.maps.FlCounted.Delete(v.inside))
		}
	}
	return errors.Join(errs...)
}

// countVeth counts packets into one veth, with the host end e.
func (t *Drops) countVeth(ns *netdev.NS, e container.End, inside dropFlDevice) (err error) {
	d := t.dropper
	v, counted := t.veths[e.Device]
	if !counted {
		// Count the ring's output before its input, or the ring would seem full.
		if err := d.maps.FlCounted.Put(inside, t.Slot); err != nil {
			return err
		}
		if v.counter, err = d.counter(e.Device); err != nil {
			return errors.Join(err, d.maps.FlCounted.Delete(inside))
		}
		v.inside = inside
		t.veths[e.Device] = v
		// Claim the place in the counter before another host end does.
		if err := d.tell(v.counter, e.Device, dropVeth{Slot: t.Slot}); err != nil {
			return err
		}
	}
	at := hook.Place{
		Device: e.Device, Path: e.Path, Egress: true, Stage: hook.Count, Name: "count_" + t.payer.String(),
		Owner: journal.Owner{Feature: d.cfg.Feature, Container: uint64(t.payer)},
	}
	return t.counts.Put(d.cfg.Ends, at, func() (*ebpf.Program, error) {
		own, err := ns.Link(e.Inside.Index)
		if err != nil {
			return nil, err
		}
		mac, err := net.ParseMAC(own.MAC)
		if err != nil {
			return nil, err
		}
		if err := d.tell(v.counter, e.Device, dropVeth{Slot: t.Slot, Mac: [6]byte(mac)}); err != nil {
			return nil, err
		}
		return v.Clone()
	})
}

// UseRing says whether packets pass the ring of the veth, which can then be full. Packets are counted
// either way.
func (t *Drops) UseRing(used bool) error {
	return t.change(func(e *dropTenant) {
		e.NoRing = 1
		if used {
			e.NoRing = 0
			e.Polled = e.Sent // earlier packets bypassed the ring
		}
	})
}

// limit drops packets once the charges of an account have reached sum, in ns. The limit ends after lasts
// unless it is renewed, so it ends without an agent.
func (t *Drops) limit(account uint32, sum int64, lasts time.Duration) error {
	return t.change(func(e *dropTenant) { e.Account, e.Limit, e.Until = account, sum, in(lasts) })
}

// Pace limits the packets that pass the uplinks to a rate, in packets/s; 0: no limit. The limit ends after
// lasts. After a pause a whole ring of packets passes at once.
func (t *Drops) Pace(perSecond float64, lasts time.Duration) error {
	return t.change(func(e *dropTenant) {
		e.Gap, e.PacedUntil = 0, 0
		if perSecond > 0 {
			e.Gap, e.PacedUntil = uint64(float64(time.Second)/perSecond), in(lasts)
		}
	})
}

// in returns the time d from now, in ns of the clock of bpf_ktime_get_ns.
func in(d time.Duration) uint64 { return bpf.Clock() + uint64(d) }

// change changes a part of the tenant's entry. Counters lose events between the read and the write. The
// next poll that empties the ring corrects those that matter.
func (t *Drops) change(by func(*dropTenant)) error {
	e, err := t.read()
	if err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	by(&e)
	if err := t.dropper.maps.FlTenants.Put(t.Slot, e); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

func (t *Drops) read() (e dropTenant, err error) {
	err = t.dropper.maps.FlTenants.Lookup(t.Slot, &e)
	return e, err
}

// Counters are packet counts of a tenant.
type Counters struct {
	Small, Super uint64 // single packets and super-packets (GSO) into its veths
	Intruding    uint64 // part of Small that took time from neither the sender, the tenant nor an idle CPU
	Dropped      uint64 // packets dropped before its veths
	Beyond       uint64 // part of Dropped for a used-up quota or limit
	Arrived      uint64 // packets at uplinks
	Held         uint64 // part of Arrived that was dropped there
	Charged      bool   // the payer is charged, not isolated
}

// Counters returns the present counters.
func (t *Drops) Counters() (Counters, error) {
	e, err := t.read()
	return Counters{Small: e.Small, Super: e.Super, Intruding: e.Intruding, Dropped: e.Dropped, Beyond: e.Beyond, Arrived: e.Arrived, Held: e.Held, Charged: t.charged}, err
}
