package drop

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Tenant is one network namespace whose packets are counted, and dropped while it
// has no time for them.
type Tenant struct {
	dropper *Dropper
	key     identity.Tenant
	slot    uint32
	counts  ends.Set // fl_count, at the host's ends of its veths
	owner   container.ID
	charged bool // not isolated
}

// Slot is the tenant's number, as Queue has it.
func (t *Tenant) Slot() uint32 { return t.slot }

// add begins to count what waits for the tenant that c belongs to, at the expense of
// c, which also owns the notes. The tenant's devices follow with countVeths.
func (d *Dropper) add(c container.Container) (_ *Tenant, err error) {
	t := &Tenant{dropper: d, key: identity.TenantOf(c), owner: c.ID}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("early drop: %w", err), t.forget())
		}
	}()
	if err := t.tell(nil); err != nil {
		return nil, err
	}
	if t.slot == uint32(identity.Nobody) || t.slot >= d.maps.FlTenants.MaxEntries() {
		return nil, fmt.Errorf("%w: %d", errSlots, t.slot)
	}
	// What an earlier tenant left in the slot.
	if err := d.maps.FlTenants.Put(t.slot, dropTenant{}); err != nil {
		return nil, fmt.Errorf("clear slot %d: %w", t.slot, err)
	}
	if d.polled == nil {
		links, err := d.object.Attach(dropProgFlPolled)
		if err != nil {
			return nil, fmt.Errorf("watch polls: %w", err)
		}
		d.polled = links
	}
	d.counted++
	return t, nil
}

// close ends what add and countVeths began. It goes on after a failure.
func (t *Tenant) close() error {
	d := t.dropper
	errs := []error{t.counts.Close(), t.forget()}
	// The drop in a driver goes on, and nobody counts any more what leaves the ring.
	errs = append(errs, d.maps.FlTenants.Put(t.slot, dropTenant{}))
	if d.counted--; d.counted == 0 {
		errs = append(errs, d.polled.Close())
		d.polled = nil
	}
	return errors.Join(errs...)
}

// teller is by whom identity is told of the tenant. A container can pay for two, the
// network namespace that it has left and the one that it is in.
func (t *Tenant) teller() string { return fmt.Sprintf("early drop of netns %d", t.key.NetNS) }

// tell has the polls of devices of the tenant counted, and no longer those of others.
func (t *Tenant) tell(devices []identity.Device) error {
	s, err := t.dropper.cfg.Identity.Tell(t.teller(), identity.Member{ID: t.owner, Tenant: t.key, Devices: devices, Counted: true})
	t.slot = uint32(s)
	return err
}

func (t *Tenant) forget() error { return t.dropper.cfg.Identity.Forget(t.teller(), t.owner) }

// countVeths counts what goes into the veths of c, whose namespace is inside, and no
// longer what goes into others.
func (t *Tenant) countVeths(inside *netdev.NS, c container.Container) error {
	has := make(map[ends.Device]bool)
	var veths []ends.End
	var devices []identity.Device
	for _, e := range ends.Of(c, "") {
		if e.Inside.HasHostEnd() {
			has[e.Device] = true
			veths = append(veths, e)
			devices = append(devices, identity.Device{Netns: inside.Inode(), Ifindex: e.Inside.Index})
		}
	}
	err := t.counts.Drop(func(d ends.Device, _ bool, _ string) bool { return !has[d] })
	// What leaves a ring is counted before what goes into it: it would seem to be full.
	if err := errors.Join(err, t.tell(devices)); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	for _, e := range veths {
		if err := t.countVeth(inside, e); err != nil {
			return fmt.Errorf("early drop: %w", err)
		}
	}
	return nil
}

// countVeth counts what goes into one veth, whose host end is e.
func (t *Tenant) countVeth(inside *netdev.NS, e ends.End) error {
	at := ends.Place{
		Device: e.Device, Path: e.Path, Egress: true, Stage: ends.Count,
		Name:  "count_" + t.owner.String(), // containers of a pod that are charged have a program each
		Owner: journal.Owner{Feature: t.dropper.cfg.Feature, Container: uint64(t.owner)},
	}
	return t.counts.Put(t.dropper.cfg.Ends, at, func() (*ebpf.Program, error) {
		own, err := inside.Link(e.Inside.Index)
		if err != nil {
			return nil, err
		}
		mac, err := net.ParseMAC(own.MAC)
		if err != nil {
			return nil, fmt.Errorf("address of device %d in netns %d: %w", e.Inside.Index, inside.Inode(), err)
		}
		return t.dropper.counter(t.slot, mac)
	})
}

// counter loads a copy of fl_count, for the veth of the tenant in a slot whose
// container's end has this address.
func (d *Dropper) counter(slot uint32, mac net.HardwareAddr) (*ebpf.Program, error) {
	return d.object.Program(dropProgFlCount, bpf.Vars{dropVarFlTenantSlot: slot, dropVarFlTenantMac: [6]byte(mac)})
}

// UseRing says whether the packets go through the ring of the veth, so that it can
// be full. The counters of packets go on.
func (t *Tenant) UseRing(used bool) error {
	return t.change(func(e *dropTenant) {
		e.NoRing = 1
		if used {
			e.NoRing = 0
			e.Polled = e.Sent // what came meanwhile did not go into it
		}
	})
}

// bill says in which account, by its slot, a packet's cost is that is dropped for
// the tenant's sake; 0 is the system's.
func (t *Tenant) bill(account uint32) error {
	if e, err := t.read(); err == nil && e.Account == account {
		return nil // a write can lose what happens meanwhile
	}
	return t.change(func(e *dropTenant) { e.Account = account })
}

// limit drops packets once the charges of an account have reached a sum, in ns, for
// so long from now. It has to be renewed: without an agent there is no limit.
func (t *Tenant) limit(account uint32, sum int64, lasts time.Duration) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return t.change(func(e *dropTenant) {
		e.Account, e.Limit = account, sum
		e.Until = uint64(now.Nano() + lasts.Nanoseconds())
	})
}

// unlimited ends that.
func (t *Tenant) unlimited() error {
	return t.change(func(e *dropTenant) { e.Until = 0 })
}

// change writes a part of the tenant's entry. An event that comes between reading
// and writing is lost to the counters; the next poll that empties the ring sets
// right what matters.
func (t *Tenant) change(by func(*dropTenant)) error {
	e, err := t.read()
	if err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	by(&e)
	if err := t.dropper.maps.FlTenants.Put(t.slot, e); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

func (t *Tenant) read() (e dropTenant, err error) {
	err = t.dropper.maps.FlTenants.Lookup(t.slot, &e)
	return e, err
}

// Counters are packets for a tenant.
type Counters struct {
	Small, Super uint64 // on their way into its veths: single ones, and super-packets (GSO)
	Dropped      uint64 // before that,
	Beyond       uint64 // and those of them while its quota or limit was used up
}

// Counters returns what was counted so far.
func (t *Tenant) Counters() (Counters, error) {
	e, err := t.read()
	return Counters{Small: e.Small, Super: e.Super, Dropped: e.Dropped, Beyond: e.Beyond}, err
}
