package drop

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

// Tenant is one network namespace whose packets are counted, and dropped while it
// has no time for them.
type Tenant struct {
	programs *Programs
	slot     uint32
	links    map[dropDevice]*qdisc.Attachment // by the container's end of the veth
	owner    container.ID
}

// Slot is the tenant's number, as Queue has it.
func (t *Tenant) Slot() uint32 { return t.slot }

// Close ends what Add and CountVeths began. It goes on after a failure.
func (t *Tenant) Close() error {
	p := t.programs
	errs := []error{t.keep(nil)}
	// The drop in a driver goes on, and nobody counts any more what leaves the ring.
	errs = append(errs, p.maps.FlTenants.Put(t.slot, dropTenant{}))
	delete(p.used, t.slot)
	if len(p.used) == 0 && p.polled != nil {
		errs = append(errs, p.polled.Close())
		p.polled = nil
	}
	return errors.Join(errs...)
}

// CountVeths counts what goes into the veths of c, whose namespace is inside, and no
// longer what goes into others.
func (t *Tenant) CountVeths(find *netdev.Finder, inside *netdev.NS, c container.Container) error {
	has := make(map[dropDevice]bool)
	for _, dev := range c.Interfaces {
		if dev.HasHostEnd() {
			has[deviceKey(inside, dev.Index)] = true
		}
	}
	if err := t.keep(has); err != nil {
		return err
	}
	for _, dev := range c.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		if l := t.links[deviceKey(inside, dev.Index)]; l != nil {
			if err := l.Hold(); err != nil {
				return err
			}
			continue
		}
		host, err := find.Open(dev.Host.NSPath, dev.Host.NetNS)
		if err != nil {
			return err
		}
		err = t.countVeth(inside, dev.Index, host, dev.Host.Index)
		host.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func deviceKey(ns *netdev.NS, index int) dropDevice {
	return dropDevice{Netns: uint32(ns.Inode()), Ifindex: uint32(index)}
}

// countVeth counts one veth: inside is the container's end, host the other one.
func (t *Tenant) countVeth(inside *netdev.NS, index int, host *netdev.NS, hostIndex int) error {
	p := t.programs
	own, err := inside.Link(index)
	if err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	mac, err := net.ParseMAC(own.MAC)
	if err != nil {
		return fmt.Errorf("early drop: address of device %d in netns %d: %w", index, inside.Inode(), err)
	}
	count, err := p.counter(t.slot, mac)
	if err != nil {
		return err
	}
	defer count.Close() // what it is attached to holds it
	key := deviceKey(inside, index)
	if err := p.maps.FlDevices.Put(key, t.slot); err != nil {
		return fmt.Errorf("early drop: watch polls of device %d in netns %d: %w", index, inside.Inode(), err)
	}
	// Containers of a pod that are charged have a program each.
	at := qdisc.Hook{NS: host, Index: hostIndex, Egress: true, Last: true, Name: "count_" + t.owner.String()}
	l, err := p.cfg.Hooks.Attach(at, count, journal.Owner{Feature: p.cfg.Feature, Container: uint64(t.owner)})
	if err != nil {
		return errors.Join(fmt.Errorf("early drop: %w", err), p.maps.FlDevices.Delete(key))
	}
	t.links[key] = l
	return nil
}

// counter loads a copy of fl_count, for the veth of the tenant in a slot whose
// container's end has this address.
func (p *Programs) counter(slot uint32, mac net.HardwareAddr) (*ebpf.Program, error) {
	c, err := p.object.Program(dropProgFlCount, bpf.Vars{dropVarFlTenantSlot: slot, dropVarFlTenantMac: [6]byte(mac)})
	if err != nil {
		return nil, fmt.Errorf("early drop: %w", err)
	}
	return c, nil
}

// keep ends the counting of all devices but some.
func (t *Tenant) keep(some map[dropDevice]bool) error {
	var errs []error
	for device, l := range t.links {
		if some[device] {
			continue
		}
		delete(t.links, device)
		errs = append(errs, l.Close())
		if err := t.programs.maps.FlDevices.Delete(device); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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

// Bill says in which account, by its slot, a packet's cost is that is dropped for
// the tenant's sake; 0 is the system's.
func (t *Tenant) Bill(account uint32) error {
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
	if err := t.programs.maps.FlTenants.Put(t.slot, e); err != nil {
		return fmt.Errorf("early drop: %w", err)
	}
	return nil
}

func (t *Tenant) read() (e dropTenant, err error) {
	err = t.programs.maps.FlTenants.Lookup(t.slot, &e)
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
