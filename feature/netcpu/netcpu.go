// Package netcpu charges each container for the CPU time of its packets (Iron, NSDI 2018).
//
// In every mode package account records the CPU time that packets take, by container and by the
// context that loses it. In the mode charge a container's quota or weight follows its account
// (packages ledger and charge). In the mode isolate (package isolate) NAPI kernel threads in the
// container's own cpu cgroup process its received packets, so the scheduler charges and limits that
// work like the container's tasks. The stage before the container (NIC poll, bridge) runs in threads
// too. They are in the cgroup of the container that a queue serves, or in a cgroup for all uplinks,
// where packets are dropped if their container has no time for them (packages uplink and drop).
// Package auto chooses among the modes. This package holds the register of tenants, passes tenants
// to the other packages, and reports.
//
// netcpu is not a traffic shaper: it never looks at bytes. Package agent calls it as a
// feature.Feature. README.md lists the changes on the host.
package netcpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/charge"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// name is the feature's name and the owner of its journal entries.
const name = "netcpu"

// Config configures New.
type Config struct {
	feature.Host

	// XDP names the uplinks, in the host's network namespace, at which the driver drops packets if it
	// can: from the first container that needs it until Close. The operator who names them accepts
	// that most drivers reset their queues for it, and the other consequences in DESIGN.md.
	XDP []string

	// QueueMin is isolate.Config.QueueMin: packets per second; 0 is the default.
	QueueMin uint64

	// QueueFlood is isolate.Config.QueueFlood: packets per second; 0 is the default.
	QueueFlood uint64

	// Ring is drop.Config.Ring: packets; 0 is the default.
	Ring uint32
}

// Netcpu is the feature. feature.Feature says which calls may be concurrent.
type Netcpu struct {
	feature.Base
	*Accounts
	cfg      Config
	layout   cgroup.Layout
	meter    *account.Meter  // nil if the kernel cannot keep accounts,
	noMeter  error           // for this reason
	charger  *charge.Charger // nil without meter
	dropper  *drop.Dropper   // nil if the kernel cannot drop early
	uplinks  *uplink.Finder
	find     *netdev.Finder
	hostNS   uint64           // inode of the host's network namespace; 0: unknown
	counting *netdev.Counting // in that namespace, for counts; nil: not open
	isolator *isolate.Isolator
	places   places // only Apply and Remove use it

	mu        sync.Mutex                     // also guards uplinks, isolator and dropper
	tenants   *tenant.Register               // of all containers
	groups    map[container.ID][2]knownGroup // cpu and cpuset cgroups
	entrances string                         // at the last look; "": no look yet
	changed   func(container.ID)             // see Notify

	closed     atomic.Bool
	stop, done chan struct{} // stop loop, loop has ended
	following  feature.Loop
}

// New finds out what the host supports. It changes no setting of the host.
func New(cfg Config) (*Netcpu, error) {
	layout, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("netcpu: %w", err)
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.NetNS = cmp.Or(cfg.NetNS, filepath.Join(cfg.Roots.Proc, "self", "ns", "net"))
	n := &Netcpu{
		Base:      feature.Base{Called: name},
		cfg:       cfg,
		layout:    layout,
		find:      netdev.NewFinder(cfg.Roots.Proc, time.Now),
		following: feature.Loop{Name: "isolation", Bound: feature.BehindCalls},
		tenants:   tenant.New(cfg.Roots.Proc, tenant.Network),
		groups:    make(map[container.ID][2]knownGroup),
		stop:      make(chan struct{}),
		done:      make(chan struct{}),
	}
	n.Beside = []*feature.Loop{&n.following}
	throttled, err := probe.KthreadsThrottled(cfg.Roots)
	if err != nil {
		throttled = true
		cfg.Log.Warn("taking kernel threads for throttled by quotas", "feature", name, "err", err)
	}
	n.uplinks = &uplink.Finder{NetNS: cfg.NetNS, Find: n.find, Who: cfg.Identity, Monitor: cfg.Roots.Monitor}
	if n.hostNS, err = n.uplinks.Host(); err != nil {
		cfg.Log.Warn("reading the counters of the host's devices over a new socket each time", "feature", name, "err", err)
	}
	accounts := account.Config{Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Identity: cfg.Identity, Ends: cfg.Ends, Owner: journal.Owner{Feature: name}, Count: n.counts}
	noDrop := cfg.Ends.Err()
	if noDrop != nil {
		accounts.Ends = nil
		cfg.Log.Warn("attaching nothing to devices: packets that a queue of the host delays are charged by socket, or to nobody", "feature", name, "err", noDrop)
	}
	if n.meter, n.noMeter = account.Open(accounts); n.noMeter != nil {
		cfg.Log.Warn("keeping no accounts of network CPU time", "feature", name, "err", n.noMeter)
	}
	n.Accounts = &Accounts{Containers: cfg.Containers, Proc: cfg.Roots.Proc, Since: time.Now(), Meter: n.meter, InForce: n.inForce}
	n.places = places{from: n.meter, of: make(map[container.ID]claim)}
	if n.meter == nil {
		none := noMeter{n.noMeter, cfg.Identity}
		n.Accounts.Meter, n.places.from = none, none
	}
	if noDrop == nil && cfg.Identity == nil {
		noDrop = n.noMeter
	}
	if noDrop == nil {
		n.dropper, noDrop = drop.Load(drop.Config{
			Feature: name, Identity: cfg.Identity, Ends: cfg.Ends, Meter: n.meter, Uplinks: n.uplinks, Find: n.find, Log: cfg.Log, XDP: cfg.XDP,
			Ring: cfg.Ring,
		})
	}
	if n.meter != nil {
		n.charger = n.newCharger()
		n.Beside = append(n.Beside, &n.charger.Loop, n.meter.Loop())
	}
	n.Verdict = support(cfg.Roots, layout, throttled, noDrop)
	n.isolator = isolate.New(isolate.Config{
		Feature: name, Key: modeKey, Tenants: n.tenants, Roots: cfg.Roots, Layout: layout, Journal: cfg.Journal,
		Find: n.find, Uplinks: n.uplinks, Throttled: throttled, Drop: n.dropper, QueueMin: cfg.QueueMin, QueueFlood: cfg.QueueFlood,
	})
	go n.loop()
	return n, nil
}

// Apply implements feature.Feature. It only observes a container until package auto decides that it
// pays (policy.Target.InForce). Without accounts a container in the mode isolate pays at once. Apply
// enforces the mode even if only a part of the account is kept. Errors: ErrNoAccounts for auto and
// charge; feature.ErrPartly if isolate does not, or would not, cover the whole path of the packets.
func (n *Netcpu) Apply(ctx context.Context, t policy.Target) error {
	to := n.aim(t)
	if err := n.locate(t.Container); err != nil {
		return fmt.Errorf("netcpu %s: %w", to.asked, err)
	}
	observed, enforced := n.observe(to), to.refused
	if enforced == nil {
		enforced = n.enforce(ctx, to)
	}
	if observed != nil && enforced != nil { // two errors are no partial success
		for _, err := range []*error{&observed, &enforced} {
			if errors.Is(*err, feature.ErrPartly) {
				*err = errors.New((*err).Error())
			}
		}
	}
	return errors.Join(observed, enforced)
}

// aim is the state that Apply brings a container to.
type aim struct {
	policy.Target               // with the mode in force
	asked         policy.NetCPU // the mode that policy asks for
	refused       error         // why that mode cannot be in force; the present one then stays
	claim         claim         // to an account
}

// aim decides what Apply does. It neither changes nor reads the host.
func (n *Netcpu) aim(t policy.Target) aim {
	asked := cmp.Or(t.Settings.NetCPU, policy.NetCPUObserve)
	if t.Settings.NetCPU = asked; n.meter != nil {
		t.Settings.NetCPU = t.InForce()
	}
	to := aim{Target: t, asked: asked, claim: claimOf(t)}
	switch asked {
	case policy.NetCPUObserve, policy.NetCPUAuto:
	case policy.NetCPUCharge:
		if n.charger == nil {
			to.refused = fmt.Errorf("netcpu charge: %w: %w", ErrNoAccounts, n.noMeter)
		}
	case policy.NetCPUIsolate:
		to.refused = n.isolates(t.Container)
	default:
		to.refused = fmt.Errorf("netcpu %s: unknown mode", asked)
	}
	return to
}

// enforce applies the mode in force. It does not settle the container's tenant, so Change still lists
// the members that have left the tenant and are not released.
func (n *Netcpu) enforce(ctx context.Context, to aim) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, mode := to.Container, to.Settings.NetCPU
	in, left, err := n.tenants.Apply(to.Target)
	switch {
	case err == nil:
	case to.asked == policy.NetCPUIsolate:
		return fmt.Errorf("netcpu isolate: %w", err)
	default: // charging and the end of isolation need no network namespace
		left = n.tenants.Remove(c.ID)
	}
	if err := n.leave(ctx, left); err != nil {
		return err
	}
	if mode == policy.NetCPUCharge {
		return n.charge(ctx, in, to.Target)
	}
	if err := n.uncharge(ctx, in, c.ID); err != nil {
		return err
	}
	if mode == policy.NetCPUIsolate {
		err = n.isolator.Isolate(ctx, in, c)
	} else {
		err = n.unisolate(ctx, in, c.ID)
	}
	switch {
	case err != nil:
		return err
	case mode == policy.NetCPUAuto && n.meter == nil:
		return fmt.Errorf("netcpu auto: %w: %w", ErrNoAccounts, n.noMeter)
	case to.asked == policy.NetCPUIsolate:
		return n.uncovered(ctx, c)
	}
	return nil
}

// Plan implements feature.Planner. It returns the changes that isolate would make.
func (n *Netcpu) Plan(ctx context.Context, c container.Container) (feature.Plan, error) {
	if err := n.isolates(c); err != nil {
		return feature.Plan{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	steps, err := n.isolator.Plan(ctx, c)
	return feature.Plan{Key: modeKey, Value: string(policy.NetCPUIsolate), Steps: steps}, err
}

// isolates returns an error that says why a container cannot be isolated, or nil.
func (n *Netcpu) isolates(c container.Container) error {
	switch {
	case n.Verdict.Level == probe.Unavailable:
		return fmt.Errorf("netcpu isolate: %s", n.Verdict.Why)
	case c.HostNetwork:
		return errors.New("netcpu isolate: the container uses the host's network namespace, whose packets cannot be told apart by device")
	case len(c.Interfaces) > 0 && !slices.ContainsFunc(c.Interfaces, container.Interface.HasHostEnd):
		return fmt.Errorf("netcpu isolate: %s: no veth with a host end that can be found: it has no polling of its own to move", c.Interfaces[0].Name)
	}
	return nil
}

// Remove implements feature.Feature.
func (n *Netcpu) Remove(ctx context.Context, id container.ID) error {
	// Forget the account first: it gives the packets of the namespace to the next member.
	err := n.forget(id)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.groups, id)
	return errors.Join(err, n.remove(ctx, id))
}

func (n *Netcpu) remove(ctx context.Context, id container.ID) error {
	left := n.tenants.Remove(id)
	if err := n.uncharge(ctx, nil, id); err != nil {
		return err
	}
	if len(left) == 0 {
		return n.unisolate(ctx, nil, id)
	}
	return n.leave(ctx, left)
}

// leave releases the containers that have left their tenants, and settles the tenants.
func (n *Netcpu) leave(ctx context.Context, left []*tenant.Tenant) error {
	var errs []error
	for _, of := range left {
		var failed []error
		for _, id := range of.Change().Left {
			failed = append(failed, n.unisolate(ctx, of, id))
			if n.dropper.Pays(of, id) {
				failed = append(failed, isolate.IgnoreGone(n.bringBudget(ctx, of)))
			}
		}
		if err := errors.Join(failed...); err != nil {
			errs = append(errs, err)
			continue
		}
		n.tenants.Settle(of)
	}
	return errors.Join(errs...)
}

// unisolate ends the isolation of a container. of is its tenant, or nil.
func (n *Netcpu) unisolate(ctx context.Context, of *tenant.Tenant, id container.ID) error {
	ended, err := n.isolator.Release(ctx, of, id)
	if ended { // another member may be charged now
		err = errors.Join(err, isolate.IgnoreGone(n.bringBudget(ctx, of)))
	}
	return errors.Join(err, n.dropper.Rest())
}

// Prune implements feature.Feature. It undoes the changes at uplinks with the last container. Apply
// claims the uplinks again for a later one.
func (n *Netcpu) Prune(_ context.Context, alive func(container.ID) bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	out, err := n.cfg.Journal.Restore(kernel.Opener(n.cfg.Roots), func(e journal.Entry) bool {
		switch {
		case e.Owner.Feature != name:
			return false
		case e.Ref.Kind == qdisc.KindFilter:
			return n.cfg.Ends.Stray(e)
		case e.Owner.Container == 0:
			return n.isolator.Idle()
		}
		return !alive(container.ID(e.Owner.Container))
	})
	return errors.Join(err, kernel.Tidy(n.cfg.Roots, out))
}

// Close implements feature.Feature. It leaves containers isolated, ends early drop and restores the
// quotas and weights that charge has written. Packets keep their present shape, because drop counts
// the packets by which isolate chooses it.
func (n *Netcpu) Close() error {
	if !n.closed.Swap(true) {
		close(n.stop)
	}
	<-n.done
	n.used.only(nil, n.Since) // close files
	var errs []error
	if n.charger != nil {
		errs = append(errs, n.charger.Close())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	errs = append(errs, n.isolator.Close(), n.dropper.Close())
	if n.meter != nil {
		errs = append(errs, n.meter.Close())
	}
	if n.counting != nil {
		n.counting.Close()
	}
	return errors.Join(errs...)
}
