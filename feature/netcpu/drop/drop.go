// Package drop drops packets early if their container has no CPU time left for them: at an uplink, by
// tc or in the driver, and at the host end of the container's veth. drop.bpf.c explains how. Packages
// isolate and netcpu decide which member of a tenant pays.
//
// Attached programs have no effect once this process has ended.
package drop

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// errSlots means that the tenant's slot is beyond the range of the BPF maps.
var errSlots = errors.New("no room for the tenant's slot")

// Config configures Load.
type Config struct {
	Feature string // owner of the journal entries
	Ends    *hook.Ends

	Identity *identity.Identity
	Meter    *account.Meter // nil without accounts: no container is charged then
	Uplinks  *uplink.Finder
	Find     *netdev.Finder
	Log      *slog.Logger

	// XDP names the uplinks in the host's network namespace at which the driver drops, if it can.
	XDP []string

	// Ring is the assumed size of a veth's ring, in packets; 0 is the kernel's default.
	Ring uint32
}

// Dropper drops packets of tenants at uplinks. A nil *Dropper drops nothing. Only
// methods that say so are safe for concurrent use.
type Dropper struct {
	cfg     Config
	object  *bpf.Object
	maps    dropMaps
	tc      *ebpf.Program
	poll    *ebpf.Program // fl_polled
	charges bool          // packets dropped by XDP are charged

	polled   bpf.Links // of poll, while there is a tenant
	counted  int       // number of tenants
	counters []*counter

	tunnels map[uint64]bool             // keys of fl_tunnels
	points  map[container.Device]*point // with tc while there is a tenant, with XDP since the first tenant

	mu      sync.Mutex // guards only these fields: Open may wait long for a driver
	tenants map[tenant.Key]*Drops
	shown   []Point
}

// Load loads the programs. An error means that this kernel cannot run them.
func Load(cfg Config) (_ *Dropper, err error) {
	d := &Dropper{cfg: cfg, tunnels: make(map[uint64]bool), points: make(map[container.Device]*point), tenants: make(map[tenant.Key]*Drops)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("early drop: %w", err), d.tc.Close(), d.poll.Close(), d.object.Close())
		}
	}()
	shared := cfg.Identity.Maps()
	if cfg.Meter != nil {
		shared[dropMapFlCharges] = cfg.Meter.Charges()
	}
	vars := bpf.Vars{}
	if cfg.Ring > 0 {
		vars["fl_ring"] = cfg.Ring
	}
	if d.object, err = bpf.Open(cfg.Feature, loadDrop, vars, shared); err != nil {
		return nil, err
	}
	// Load the other programs now, so that an error does not wait for the first container.
	var objs struct {
		dropMaps
		Polled *ebpf.Program `ebpf:"fl_polled"`
		Count  *ebpf.Program `ebpf:"fl_count"`
		Drop   *ebpf.Program `ebpf:"fl_drop_tc"`
	}
	if err := d.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	d.maps, d.tc, d.poll = objs.dropMaps, objs.Drop, objs.Polled
	if err := objs.Count.Close(); err != nil {
		return nil, err
	}
	return d, nil
}

// Close ends all drops and closes the programs.
func (d *Dropper) Close() error {
	if d == nil {
		return nil
	}
	var errs []error
	for key := range d.tenants {
		errs = append(errs, d.End(key))
	}
	errs = append(errs, d.close(func(*point) bool { return true }))
	return errors.Join(append(errs, d.polled.Close(), d.poll.Close(), d.tc.Close(), d.object.Close())...)
}

// Maps returns how full the maps are.
func (d *Dropper) Maps() []bpf.Usage { return d.object.Usage() }

// Begin counts packets for a tenant in the network namespace ns, and drops those that payer has no
// time for. If payer is charged, it drops packets once they have cost what Allow permits. If payer is
// isolated, it drops packets while the ring of a veth is full or the quota is used up. Begin ends an
// earlier Begin for another payer. A repeated call updates the payer's veths. A nil *Dropper returns
// nil.
func (d *Dropper) Begin(ns *netdev.NS, of *tenant.Tenant, payer container.Container, charged bool) (t *Drops, err error) {
	if d == nil {
		return nil, nil
	}
	t = d.at(of.Key())
	if t != nil && (t.payer != payer.ID || t.charged != charged) { // its changes on the host go with the payer
		if err := d.End(of.Key()); err != nil {
			return nil, err
		}
		t = nil
	}
	if t == nil {
		if t, err = d.add(of.Key(), payer.ID); err != nil {
			return nil, err
		}
		if t.charged = charged; charged {
			// Softirqs poll, so no packets wait in a ring.
			if err := t.change(func(e *dropTenant) { e.NoRing = 1 }); err != nil {
				return nil, errors.Join(err, t.close())
			}
		}
		d.mu.Lock()
		d.tenants[of.Key()] = t
		d.mu.Unlock()
	}
	return t, t.countVeths(ns, payer)
}

// End undoes Begin.
func (d *Dropper) End(key tenant.Key) error {
	t := d.at(key)
	if t == nil {
		return nil
	}
	d.mu.Lock()
	delete(d.tenants, key)
	d.mu.Unlock()
	return t.close()
}

// Pays reports whether a container is the payer of a tenant, even if it has left the tenant since Begin.
func (d *Dropper) Pays(of *tenant.Tenant, id container.ID) bool {
	t := d.at(of.Key())
	return t != nil && t.payer == id
}

func (d *Dropper) at(key tenant.Key) *Drops {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tenants[key]
}

// Allow limits the time that a charged container's packets may take from others; ledger.Unlimited is any
// time. The limit ends after lasts. Allow is safe for concurrent use.
func (d *Dropper) Allow(id container.ID, budget, lasts time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tenants {
		if t.payer != id || !t.charged {
			continue
		}
		slot, known := d.cfg.Meter.Slot(id)
		if budget == ledger.Unlimited || !known {
			return t.change(func(e *dropTenant) { e.Until = 0 })
		}
		var charges int64
		if err := d.cfg.Meter.Charges().Lookup(slot, &charges); err != nil {
			return fmt.Errorf("charges of container %v: %w", id, err)
		}
		return t.limit(slot, charges+budget.Nanoseconds(), lasts)
	}
	return nil // its packets pass no veth, or another container pays for them
}

// Counters returns the counters of tenants, by payer. If a container pays for several tenants, it returns
// those of the tenant with the most drops. It is safe for concurrent use.
func (d *Dropper) Counters() map[container.ID]Counters {
	of := make(map[container.ID]Counters)
	if d == nil {
		return of
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tenants {
		if c, err := t.Counters(); err == nil && c.Dropped >= of[t.payer].Dropped {
			of[t.payer] = c
		}
	}
	return of
}
