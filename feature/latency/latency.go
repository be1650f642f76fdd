// Package latency measures how much time a container's packets spend on this host (MACE): between
// the container's device and the uplink, between its socket and the uplink, and in each stage.
//
// latency.bpf.c takes the times in the kernel and counts them in histograms. This package selects
// the tenants, devices and sockets to measure, and reads the counters. It changes neither packets
// nor the host, and does not see the network beyond the uplink. Package agent calls it, as a
// feature.Feature. README.md states the cost per packet.
package latency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// name is the feature's name.
const name = "latency"

// watchedBudget is the factor by which the budget grows while the host is watched.
const watchedBudget = 20

// defaultBudget is the default of Config.Budget.
const defaultBudget = 5000

// rowOfStamps is ROW of maps.bpf.h: a packet's stamp has one of this many places.
const rowOfStamps = 8

// mostStamps limits the packets in flight that have a stamp.
const mostStamps = rowOfStamps << 12

// Config is the argument of New.
type Config struct {
	feature.Host

	// Work reports the packet work of the CPUs. It may be nil.
	Work feature.Worker

	// Uplinks names the devices by which packets leave and enter the host. Empty: all hardware
	// that is up, and bonds.
	Uplinks []string
	// Budget limits how many packets each CPU measures per second. Beyond it packets are chosen
	// at random. 0: defaultBudget.
	Budget uint32
}

// Latency is the feature. feature.Feature says how it may be called.
type Latency struct {
	feature.Base
	cfg Config

	mu       sync.Mutex
	host     *netdev.NS // nil once closed, or without support
	unwatch  func() error
	uplinks  uplinks                  // as of the last ends
	meter    *meter                   // nil while no container is measured
	idle     *meter                   // detached, for the next container
	idling   *time.Timer              // unloads idle
	tracer   *tracer                  // nil while no records are requested
	tenants  *tenant.Register         // of the containers that policy measures
	measured map[tenant.Key]*measured // one of each tenant
	reading  feature.Loop
	stop     chan struct{} // ends dutyCycle
	lapsing  bool          // lapse is scheduled
	spells   spells
	grants   map[grantee]grant
	asked    map[container.ID]bool // containers that the last Decide wants measured
	news     chan struct{}         // closed by the next Decide or Apply
	orphans  uint64                // waits without a record in earlier tracers of the meter
}

// measured is what the feature keeps for one tenant.
type measured struct {
	slot   identity.Slot
	traced bool // its packets are recorded one by one

	asked, askedSelf time.Time // end of the last request for records, by an operator and by the container itself
	numbered         uint64    // number after the last record of recordings that have ended
}

// New probes the host. It changes nothing.
func New(cfg Config) (*Latency, error) {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.NetNS = cmp.Or(cfg.NetNS, filepath.Join(cfg.Roots.Proc, "self", "ns", "net"))
	cfg.Budget = cmp.Or(cfg.Budget, defaultBudget)
	f := &Latency{
		Base:     feature.Base{Called: name},
		cfg:      cfg,
		tenants:  tenant.New(cfg.Roots.Proc, tenant.Network),
		measured: make(map[tenant.Key]*measured),
		reading:  feature.Loop{Name: "records"},
		spells:   make(spells),
		grants:   make(map[grantee]grant),
		asked:    make(map[container.ID]bool),
		news:     make(chan struct{}),
	}
	f.Beside = []*feature.Loop{&f.reading}
	if os.Geteuid() != 0 {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "not root: no program can be loaded", Mend: "run the agent as root"}
		return f, nil
	}
	if err := supported(); err != nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: err.Error(), Mend: "a kernel with BTF"}
		return f, nil
	}
	if cfg.Identity == nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "the maps that identify packets could not be made", Mend: "the agent's log has the reason"}
		return f, nil
	}
	var err error
	if f.host, err = netdev.Open(cfg.NetNS); err != nil {
		return nil, fmt.Errorf("latency: %w", err)
	}
	f.Verdict = probe.Verdict{Level: probe.Full}
	return f, nil
}

// Apply implements feature.Feature. A tenant is measured if policy measures one of its members.
func (f *Latency) Apply(_ context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.wake()
	if t.Settings.Latency == nil || !*t.Settings.Latency {
		return f.remove(t.Container.ID)
	}
	if f.host == nil {
		return fmt.Errorf("latency: %s", f.Verdict.Why)
	}
	in, left, err := f.tenants.Apply(t)
	if err == nil {
		err = errors.Join(f.settle(left), f.measure(in, t.Container))
	}
	if err != nil {
		return fmt.Errorf("latency: %w", err)
	}
	return nil
}

// measure brings the meter up to date with a tenant after a change of its member c.
func (f *Latency) measure(t *tenant.Tenant, c container.Container) error {
	if err := f.open(); err != nil {
		return errors.Join(err, f.remove(c.ID))
	}
	m, err := identity.Of(c)
	slot, terr := f.cfg.Identity.Tell(name, m)
	err = errors.Join(err, terr)
	if slot == identity.Nobody {
		return errors.Join(err, f.remove(c.ID))
	}
	if f.measured[t.Key()] == nil {
		if merr := f.meter.add(slot); merr != nil {
			return errors.Join(err, merr, f.remove(c.ID))
		}
		f.measured[t.Key()] = &measured{slot: slot}
	}
	f.tenants.Settle(t)
	return errors.Join(err, f.follow())
}

// Remove implements feature.Feature.
func (f *Latency) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.remove(id)
}

func (f *Latency) remove(id container.ID) error {
	left := f.tenants.Remove(id)
	if len(left) == 0 {
		return nil
	}
	return errors.Join(f.cfg.Identity.Forget(name, id), f.settle(left))
}

// settle brings the meter up to date with tenants that a container has left.
func (f *Latency) settle(left []*tenant.Tenant) error {
	if len(left) == 0 {
		return nil
	}
	var errs []error
	for _, t := range left {
		if m := f.measured[t.Key()]; m != nil && len(t.Members()) == 0 {
			delete(f.measured, t.Key())
			f.tracer.forget(m.slot) // the slot's next tenant must not see them
			errs = append(errs, f.meter.remove(m.slot))
		}
		f.tenants.Settle(t)
	}
	if len(f.measured) == 0 {
		return errors.Join(append(errs, f.shut())...)
	}
	return errors.Join(append(errs, f.follow())...)
}

// of returns what is kept for a container's tenant, nil if the container is not measured.
func (f *Latency) of(id container.ID) *measured {
	t := f.tenants.Of(id)
	if t == nil {
		return nil
	}
	return f.measured[t.Key()]
}

// open attaches the programs unless they are attached.
func (f *Latency) open() (err error) {
	if f.meter != nil {
		return nil
	}
	if m := f.idle; m != nil {
		f.idle = nil
		f.idling.Stop()
		m.since, m.rested = time.Time{}, 0
		if err := m.resume(); err != nil {
			return errors.Join(err, m.close())
		}
		f.meter = m
	} else if f.meter, err = openMeter(f.host.Inode(), f.cfg.Identity.Maps()); err != nil {
		f.meter = nil
		return err
	}
	f.stop = make(chan struct{})
	go f.dutyCycle(f.stop)
	// Without a watch, a change of the uplinks is seen only at the next Apply.
	if f.unwatch, err = f.cfg.Roots.Monitor.Watch(f.host, netdev.Interest{Causes: []netdev.Cause{netdev.LinkChanged}}, func([]netdev.Change) {
		f.reading.Turn(f.changed)
	}); err != nil {
		f.cfg.Log.Warn("watch uplinks", "err", err)
		f.unwatch = nil
	}
	return nil
}

// idleTime is how long programs stay loaded without a tenant. To load them takes 0.2 s of CPU time.
const idleTime = 5 * time.Second

// shut detaches everything if no tenant is measured, and closes it after idleTime, or at once if
// packets were recorded, because the next tenant must not see them.
func (f *Latency) shut() error {
	if len(f.measured) > 0 || f.meter == nil {
		return nil
	}
	var errs []error
	if f.unwatch != nil {
		errs = append(errs, f.unwatch())
		f.unwatch = nil
	}
	close(f.stop)
	m := f.meter
	errs = append(errs, f.tracer.close(), m.rest(), m.watch(false), m.follow(new(ends), 0))
	f.meter, f.tracer, f.orphans = nil, nil, 0
	if m.recorded {
		return errors.Join(append(errs, m.close())...)
	}
	f.idle, f.idling = m, time.AfterFunc(idleTime, func() { f.reading.Turn(f.unload) })
	return errors.Join(errs...)
}

// unload closes a meter that no tenant has needed for idleTime.
func (f *Latency) unload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.idle.close(); err != nil {
		f.cfg.Log.Warn("unload programs", "err", err)
	}
	f.idle = nil
}

// changed is called when devices of the host's namespace have changed.
func (f *Latency) changed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter == nil {
		return
	}
	if now, err := f.findUplinks(); err == nil && now == f.uplinks {
		return // a container's device has changed
	}
	if err := f.follow(); err != nil {
		f.cfg.Log.Warn("follow uplinks", "err", err)
	}
}

// follow updates the maps and the programs at sockets to the tenants.
func (f *Latency) follow() error {
	e, err := f.ends()
	if err != nil {
		return err
	}
	budget, watch := f.cfg.Budget, f.watches(time.Now())
	if watch {
		budget *= watchedBudget
	}
	return errors.Join(f.meter.follow(e, budget), f.meter.watch(watch))
}

// Prune implements feature.Feature. An earlier agent leaves nothing behind.
func (f *Latency) Prune(context.Context, func(container.ID) bool) error { return nil }

// Close implements feature.Feature. Nothing stays in the kernel.
func (f *Latency) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, t := range f.tenants.Tenants() {
		for _, m := range t.Members() {
			errs = append(errs, f.cfg.Identity.Forget(name, m.Container.ID))
		}
	}
	f.tenants = tenant.New(f.cfg.Roots.Proc, tenant.Network)
	clear(f.measured)
	errs = append(errs, f.shut(), f.idle.close())
	f.idle = nil
	if f.host != nil {
		errs = append(errs, f.host.Close())
		f.host = nil
	}
	return errors.Join(errs...)
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
