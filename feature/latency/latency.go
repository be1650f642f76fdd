// Package latency measures what a container costs each of its packets on this
// host (MACE): the time between the container's device and the uplink, between
// its socket and the uplink, and what each stage of the way has of it.
//
// latency.bpf.c takes the times inside the kernel and counts them in histograms;
// this part says which devices and sockets are whose, and reads what was counted.
// It changes no packet and nothing on the host, and does not see how long a network
// takes beyond the uplink. Package agent calls it, as a feature.Feature. README.md
// says what a packet pays for it.
package latency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// name is the feature's name.
const name = "latency"

// tracedBudget is how many times the budget is allowed while the host is watched.
const tracedBudget = 20

// DefaultBudget is how many packets a second each CPU measures at the most,
// unless Config says otherwise.
const DefaultBudget = 5000

// rowOfStamps is ROW of maps.bpf.h: a packet has one of so many places.
const rowOfStamps = 8

// MostStamps is how many packets under way have room.
const MostStamps = rowOfStamps << 12

// Config is what New needs.
type Config struct {
	Roots kernel.Roots
	Log   *slog.Logger // nil: no log
	// Identity says whose devices and sockets are. nil: one of its own.
	Identity *identity.Identity

	// Containers is who runs here. It may be nil where nobody asks for reports.
	Containers feature.Containers
	// Work is who knows for whose packets the CPUs work; nil: nobody does.
	Work feature.Worker

	// NetNS is a path to the host's network namespace, where its uplinks are;
	// "" is the namespace of this process.
	NetNS string
	// Uplinks names the devices by which packets leave and enter the host. Empty:
	// all hardware that is up, and bonds.
	Uplinks []string
	// Budget is how many packets a second each CPU measures at the most; beyond,
	// they are chosen by chance. 0: DefaultBudget.
	Budget uint32
	// Stamps is how many packets under way have room, a power of two from 8 to
	// MostStamps; 0: MostStamps.
	Stamps uint32
}

// Latency is the feature. See feature.Feature for how it may be called.
type Latency struct {
	cfg     Config
	support probe.Verdict

	own *identity.Identity // closed with the feature

	mu      sync.Mutex
	host    *netdev.NS // nil once closed, or where nothing works
	unwatch func() error
	meter   *meter  // nil while no container is measured
	tracer  *tracer // nil while nobody asks for records
	tenants map[identity.Tenant]*tenant
	member  map[container.ID]*tenant
	reading feature.Loop
	stop    chan struct{} // ends turns
	lapsing bool          // lapse will be called
	spells  spells
	grants  map[grantee]grant
	applied chan struct{} // closed when Apply has been called
	astray  uint64        // waits that earlier tracers of the meter had no record for
}

// tenant is one network tenant that is measured, however many containers it is.
type tenant struct {
	key     identity.Tenant
	slot    identity.Slot
	members map[container.ID]container.Container
	traced  bool // its packets are recorded one by one

	asked, askedSelf time.Time // until when the host, or itself, wants records
	numbered         uint64    // behind the last record of a recording that is over
}

// first is the container that stands for a tenant: the one with the lowest id.
func (t *tenant) first() container.ID {
	return slices.Min(slices.Collect(maps.Keys(t.members)))
}

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*Latency, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.NetNS == "" {
		cfg.NetNS = filepath.Join(cfg.Roots.Proc, "self", "ns", "net")
	}
	cfg.Budget, cfg.Stamps = cmp.Or(cfg.Budget, DefaultBudget), cmp.Or(cfg.Stamps, MostStamps)
	if cfg.Stamps < rowOfStamps || cfg.Stamps > MostStamps || bits.OnesCount32(cfg.Stamps) != 1 {
		return nil, fmt.Errorf("latency: %d stamps: want a power of two from %d to %d", cfg.Stamps, rowOfStamps, MostStamps)
	}
	f := &Latency{cfg: cfg, tenants: make(map[identity.Tenant]*tenant), member: make(map[container.ID]*tenant), reading: feature.Loop{Name: "records"}, spells: make(spells), grants: make(map[grantee]grant), applied: make(chan struct{})}
	if os.Geteuid() != 0 {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: "not root: no program can be loaded", Mend: "run the agent as root"}
		return f, nil
	}
	if err := supported(); err != nil {
		f.support = probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel of 5.15 or later with BTF"}
		return f, nil
	}
	var err error
	if cfg.Identity == nil {
		if f.own, err = identity.Open(cfg.Roots.Proc); err != nil {
			return nil, fmt.Errorf("latency: %w", err)
		}
		f.cfg.Identity = f.own
	}
	if f.host, err = netdev.Open(cfg.NetNS); err != nil {
		return nil, errors.Join(fmt.Errorf("latency: %w", err), f.own.Close())
	}
	f.support = probe.Verdict{Level: probe.Full}
	return f, nil
}

// Loops implements feature.Looper.
func (f *Latency) Loops() []*feature.Loop { return []*feature.Loop{&f.reading} }

// Name implements feature.Feature.
func (f *Latency) Name() string { return name }

// Support implements feature.Feature.
func (f *Latency) Support() probe.Verdict { return f.support }

// Apply implements feature.Feature. Containers that share a network are measured
// together if one of them is to be.
func (f *Latency) Apply(_ context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.tell()
	if t.Settings.Latency == nil || !*t.Settings.Latency {
		return f.remove(t.Container.ID)
	}
	if f.host == nil {
		return fmt.Errorf("latency: %s", f.support.Why)
	}
	if err := f.add(t.Container); err != nil {
		return fmt.Errorf("latency: %w", err)
	}
	return nil
}

func (f *Latency) add(c container.Container) error {
	key := identity.TenantOf(c)
	if key == (identity.Tenant{}) {
		return errors.New("the container's network is not known")
	}
	if t := f.member[c.ID]; t != nil && t.key != key {
		if err := f.remove(c.ID); err != nil { // it has moved
			return err
		}
	}
	if err := f.open(); err != nil {
		return err
	}
	m, err := identity.Of(c)
	slot, terr := f.cfg.Identity.Tell(name, m)
	if slot == identity.Nobody {
		return errors.Join(err, terr, f.shut())
	}
	t := f.tenants[key]
	if t == nil {
		if err := f.meter.add(slot); err != nil {
			return errors.Join(err, f.cfg.Identity.Forget(name, c.ID), f.shut())
		}
		t = &tenant{key: key, slot: slot, members: make(map[container.ID]container.Container)}
		f.tenants[key] = t
	}
	t.members[c.ID] = c
	f.member[c.ID] = t
	return errors.Join(err, terr, f.follow())
}

// open has the programs attached, if they are not.
func (f *Latency) open() (err error) {
	if f.meter != nil {
		return nil
	}
	if f.meter, err = openMeter(f.host.Inode(), f.cfg.Stamps, f.cfg.Identity.Maps()); err != nil {
		f.meter = nil
		return err
	}
	f.stop = make(chan struct{})
	go f.turns(f.stop)
	// An uplink may come or go. Without a watch it is seen when the next container is.
	if f.unwatch, err = f.host.Watch(f.changed); err != nil {
		f.cfg.Log.Warn("watch uplinks", "err", err)
		f.unwatch = nil
	}
	return nil
}

// changed is called when devices of the host's namespace have changed.
func (f *Latency) changed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter == nil {
		return
	}
	if err := f.follow(); err != nil {
		f.cfg.Log.Warn("follow uplinks", "err", err)
	}
}

// follow brings the maps and the sockets to what the tenants are now.
func (f *Latency) follow() error {
	e, err := f.ends()
	if err != nil {
		return err
	}
	budget, watch := f.cfg.Budget, f.watches(time.Now())
	if watch {
		budget *= tracedBudget
	}
	return errors.Join(f.meter.follow(e, budget), f.meter.watch(watch))
}

// Remove implements feature.Feature.
func (f *Latency) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.remove(id)
}

func (f *Latency) remove(id container.ID) error {
	t := f.member[id]
	if t == nil {
		return nil
	}
	delete(f.member, id)
	delete(t.members, id)
	err := f.cfg.Identity.Forget(name, id)
	if len(t.members) == 0 {
		delete(f.tenants, t.key)
		f.tracer.forget(t.slot) // the next who gets the slot must not see them
		err = errors.Join(err, f.meter.remove(t.slot))
	}
	if len(f.tenants) == 0 {
		return errors.Join(err, f.shut())
	}
	return errors.Join(err, f.follow())
}

// shut takes everything out of the kernel if nobody is measured.
func (f *Latency) shut() error {
	if len(f.tenants) > 0 || f.meter == nil {
		return nil
	}
	var errs []error
	if f.unwatch != nil {
		errs = append(errs, f.unwatch())
		f.unwatch = nil
	}
	close(f.stop)
	errs = append(errs, f.tracer.close(), f.meter.close())
	f.meter, f.tracer, f.astray = nil, nil, 0
	return errors.Join(errs...)
}

// Prune implements feature.Feature. Nothing of an earlier agent can be left.
func (f *Latency) Prune(context.Context, func(container.ID) bool) error { return nil }

// Close implements feature.Feature. Nothing stays in the kernel.
func (f *Latency) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var err error
	for id := range f.member {
		err = errors.Join(err, f.cfg.Identity.Forget(name, id))
	}
	clear(f.tenants)
	clear(f.member)
	err = errors.Join(err, f.shut(), f.own.Close())
	f.own = nil
	if f.host != nil {
		err = errors.Join(err, f.host.Close())
		f.host = nil
	}
	return err
}

// Maps implements feature.Mapped.
func (f *Latency) Maps() []bpf.Usage {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter == nil {
		return nil
	}
	return f.meter.object.Usage()
}
