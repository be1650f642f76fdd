// Package netcpu makes the CPU time that a container's packets cost the
// container's own (Iron, NSDI 2018).
//
// In the mode observe, and beneath every other, it keeps accounts of whose
// packets took whose time (package account). In the mode charge the container's
// quota or weight follows them (package ledger). In the mode isolate the container's
// receive processing runs in NAPI kernel threads, and those threads live in the
// container's own cpu cgroup, so that the scheduler charges and limits it like
// anything else the container does. What comes before the container (NIC poll,
// bridge) runs in threads too: of the container whose packets a queue brings, or
// of a group of its own; and a packet that the container has no time for is
// dropped there.
//
// It is not a traffic shaper: it never looks at how many bytes a container is
// due. Package agent calls it, as a feature.Feature. README.md beside this
// file says what is changed on the host and what it was measured to give.
package netcpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// name is the feature's name and the owner of its journal entries.
const name = "netcpu"

// Config is what New needs.
type Config struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger // for what goes wrong with nobody to return it to; nil: no log

	// Containers is who runs here. It may be nil where nobody asks for reports.
	Containers feature.Containers

	// NetNS is a path to the host's network namespace, where its uplinks are;
	// "" is the namespace of this process.
	NetNS string

	// XDP names the uplinks of that namespace at which packets are dropped in the
	// driver, where it can, from the first container that needs it until Close: the
	// one who names them knows that most drivers reset their queues for it, and
	// README.md what else it means.
	XDP []string
}

// Netcpu is the feature. See feature.Feature for how it may be called.
type Netcpu struct {
	*Accounts
	cfg     Config
	layout  cgroup.Layout
	find    *netdev.Finder
	support probe.Verdict
	// throttled says that the kernel stops a kernel thread whose group has
	// used up its quota; where it does not, weight has to do it.
	throttled bool
	hooks     *qdisc.Hooks   // nil where the kernel has none
	early     *early         // nil where the kernel cannot run it
	meter     *account.Meter // nil where the kernel cannot keep accounts,
	noMeter   error          // and why
	charger   *charger       // nil without meter
	guards    *guards        // nil without early or meter

	mu      sync.Mutex
	tenants map[uint64]*tenant       // by network namespace
	member  map[container.ID]*tenant // each container that Apply isolated
	charged map[container.ID]container.Container
	lapses  map[container.ID]time.Time // of each whose isolation does
	places  map[container.ID][2]place  // its groups of cpu and cpuset
	homes   map[home]bool              // where containers have lived
	host    *uplinks                   // nil while nothing is isolated
	doors   doors                      // by tc while anything is watched, by XDP from then on

	showing sync.Mutex // of shown alone: an Apply may wait long for a driver
	shown   []Door

	looked     time.Time // the last window's end
	closed     atomic.Bool
	stop, done chan struct{} // of controlLoop
}

// tenant is one network namespace, whose packets are charged to one cgroup
// however many containers share it.
type tenant struct {
	netns   uint64
	owner   container.ID // who pays
	group   string       // the cgroup of the cpu controller that pays
	cpuset  string       // and the one of the cpuset controller; "" for none
	queues  bool         // whether queues of uplinks may be given to it
	members map[container.ID]container.Container
	threads []thread
	early   *watched // nil without early drop
	control control
	counted counted
}

// thread is a NAPI kernel thread that this feature placed.
type thread struct {
	sched.Thread
	device string
}

// New finds out what the host can do. It changes nothing.
func New(cfg Config) (*Netcpu, error) {
	layout, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("netcpu: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.NetNS == "" {
		cfg.NetNS = filepath.Join(cfg.Roots.Proc, "self", "ns", "net")
	}
	n := &Netcpu{
		cfg:     cfg,
		layout:  layout,
		find:    netdev.NewFinder(cfg.Roots.Proc, time.Now),
		tenants: make(map[uint64]*tenant),
		member:  make(map[container.ID]*tenant),
		charged: make(map[container.ID]container.Container),
		lapses:  make(map[container.ID]time.Time),
		places:  make(map[container.ID][2]place),
		homes:   make(map[home]bool),
		doors:   make(doors),
		stop:    make(chan struct{}),
		done:    make(chan struct{}),
	}
	if n.throttled, err = probe.KthreadsThrottled(cfg.Roots); err != nil {
		n.throttled = true
		cfg.Log.Warn("taking kernel threads for throttled by quotas", "feature", name, "err", err)
	}
	var why error
	n.hooks, why = qdisc.OpenHooks(n.find, cfg.Journal)
	if why != nil {
		cfg.Log.Warn("attaching nothing to devices: packets that a queue of the host delays are charged by socket, or to nobody", "feature", name, "err", why)
	}
	if n.meter, n.noMeter = account.Open(account.Config{
		Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Hooks: n.hooks, Owner: journal.Owner{Feature: name},
	}); n.noMeter != nil {
		cfg.Log.Warn("keeping no accounts of network CPU time", "feature", name, "err", n.noMeter)
	}
	n.Accounts = &Accounts{Meter: n, Containers: cfg.Containers, Since: time.Now()}
	var charges, dropped *ebpf.Map
	if n.meter != nil {
		charges, dropped = n.meter.Charges(), n.meter.Dropped()
	}
	if n.hooks != nil {
		n.early, why = newEarly(n.hooks, charges, dropped)
		if n.early != nil && n.meter != nil {
			n.early.taker = n.meter.Taker
		}
	}
	if n.meter != nil {
		n.charger = n.newCharger()
	}
	n.support = support(cfg.Roots, layout, n.throttled, why)
	go n.controlLoop(n.stop, n.done)
	return n, nil
}

// Name implements feature.Feature.
func (n *Netcpu) Name() string { return name }

// Support implements feature.Feature.
func (n *Netcpu) Support() probe.Verdict { return n.support }

// Apply implements feature.Feature. In the mode auto it only observes: what
// follows is decided by Autos, and comes as another mode. That a container
// cannot be accounted for in every part keeps nothing else from being done.
// Errors: ErrNoAccounts for auto and charge, feature.ErrNotBuilt for a mode that
// there is not.
func (n *Netcpu) Apply(ctx context.Context, t policy.Target) error {
	mode := cmp.Or(t.Settings.NetCPU, policy.NetCPUObserve)
	if err := n.locate(t.Container); err != nil {
		return fmt.Errorf("netcpu %s: %w", mode, err)
	}
	return errors.Join(n.observe(t.Container, mode), n.enforce(ctx, t, mode))
}

// enforce does what a mode does beside observing.
func (n *Netcpu) enforce(ctx context.Context, t policy.Target, mode policy.NetCPU) error {
	switch mode {
	case policy.NetCPUObserve:
		return n.release(ctx, t.Container.ID)
	case policy.NetCPUAuto:
		err := n.release(ctx, t.Container.ID)
		if n.meter == nil {
			err = errors.Join(err, fmt.Errorf("netcpu auto: %w: %w", ErrNoAccounts, n.noMeter))
		}
		return err
	case policy.NetCPUCharge:
		return n.charge(ctx, t.Container, t.Settings.NetCPUReserve)
	case policy.NetCPUIsolate:
	default:
		return fmt.Errorf("netcpu %s: %w", mode, feature.ErrNotBuilt)
	}
	if n.support.Level == probe.Unavailable {
		return fmt.Errorf("netcpu isolate: %s", n.support.Why)
	}
	c := t.Container
	if c.HostNetwork {
		return errors.New("netcpu isolate: the container uses the host's network namespace, whose packets cannot be told apart by device")
	}
	if err := n.uncharge(ctx, c.ID); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lapses[c.ID] = t.Expiry
	if err := n.isolate(ctx, c); err != nil {
		return err
	}
	return errors.Join(n.bill(n.member[c.ID]), n.extend(n.member[c.ID]))
}

// newCharger makes the charger, and what drops for it where that can be.
func (n *Netcpu) newCharger() *charger {
	cfg := chargeConfig{
		roots: n.cfg.Roots, layout: n.layout, journal: n.cfg.Journal, log: n.cfg.Log,
		read: n.costs(),
	}
	if n.early != nil {
		n.guards = &guards{early: n.early, meter: n.meter, of: make(map[uint64]*watched)}
		cfg.allow = n.guards.allow
	}
	return newCharger(cfg)
}

// charge makes the quota or the weight of a container follow its account.
// reserve is nil for the usual one.
func (n *Netcpu) charge(ctx context.Context, c container.Container, reserve *float64) error {
	if n.charger == nil {
		return fmt.Errorf("netcpu charge: %w: %w", ErrNoAccounts, n.noMeter)
	}
	if !n.charger.has(c.ID) {
		if err := n.release(ctx, c.ID); err != nil { // of isolation
			return err
		}
	}
	t := ledger.DefaultReserve
	if reserve != nil {
		t = *reserve
	}
	if err := n.charger.add(c, t); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.charged[c.ID] = c
	return errors.Join(n.guard(ctx, c.NetNS), n.extendHost())
}

// uncharge ends it, for a container that is not charged as well.
func (n *Netcpu) uncharge(ctx context.Context, id container.ID) error {
	if n.charger == nil {
		return nil
	}
	if err := n.charger.remove(id); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.charged[id]
	if !ok {
		return nil
	}
	delete(n.charged, id)
	return errors.Join(passing(n.guard(ctx, c.NetNS)), n.extendHost())
}

// passing leaves out errors of what has gone with a container that shared it:
// the next list of devices is about to come.
func passing(err error) error {
	if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) || errors.Is(err, netdev.ErrNoNS) || errors.Is(err, errNoNAPI) {
		return nil
	}
	return err
}

// Remove implements feature.Feature.
func (n *Netcpu) Remove(ctx context.Context, id container.ID) error {
	// First the account: what it had of a namespace is the next one's then.
	err := errors.Join(n.forget(id), n.release(ctx, id))
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.places, id)
	maps.DeleteFunc(n.homes, func(h home, _ bool) bool { return h.id == id })
	return err
}

// release ends charging and isolation. If the container paid for a namespace
// that others are still in, the next of them takes over.
func (n *Netcpu) release(ctx context.Context, id container.ID) error {
	if err := n.uncharge(ctx, id); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.lapses, id)
	// First of all, as a thread that stays in the cgroup of a container which
	// has ended keeps the runtime from removing it. It is also for what an
	// earlier agent, or an Apply that failed, has left.
	t := n.member[id]
	if t != nil && t.owner == id {
		if err := n.takeQueues(t); err != nil {
			return err
		}
	}
	if err := n.undo(id); err != nil {
		return err
	}
	delete(n.member, id)
	// What is left is of the accounts, which do not end with a decision.
	if err := n.extendOf(id); err != nil || t == nil {
		return err
	}
	delete(t.members, id)
	if t.owner != id {
		return errors.Join(n.bill(t), n.extend(t))
	}
	delete(n.tenants, t.netns)
	err := n.unwatch(t)
	for m, c := range t.members {
		delete(n.member, m)
		if len(n.tenants) == 0 || n.tenants[t.netns] == nil {
			err = errors.Join(err, passing(n.isolate(ctx, c)))
			continue
		}
		n.join(n.tenants[t.netns], c)
	}
	if len(n.tenants) == 0 {
		err = errors.Join(err, n.releaseUplinks())
	}
	if next := n.tenants[t.netns]; next != nil {
		err = errors.Join(err, n.bill(next), n.extend(next))
	} else {
		err = errors.Join(err, passing(n.guard(ctx, t.netns)), n.extendHost())
	}
	return errors.Join(err, n.restDoors())
}

// extend makes what was changed for a tenant, and for all of them, lapse when the
// last of those lapses for whom it was; never if one of them does not.
func (n *Netcpu) extend(t *tenant) error {
	return errors.Join(n.extendOf(t.owner), n.extendHost())
}

func (n *Netcpu) extendHost() error { return n.extendOf(0) }

func (n *Netcpu) extendOf(id container.ID) error {
	return n.cfg.Journal.Extend(func(e journal.Entry) bool {
		return e.Owner.Feature == name && e.Owner.Container == uint64(id)
	}, n.lapse(id))
}

// lapse is when what is changed on behalf of a container lapses; 0 is the host.
func (n *Netcpu) lapse(id container.ID) (last time.Time) {
	if id == 0 && len(n.charged) > 0 {
		return last // they need what drops at the uplinks, too
	}
	of := map[container.ID]bool{id: true}
	if t := n.member[id]; t != nil {
		for m := range t.members {
			of[m] = true
		}
	}
	for m, at := range n.lapses {
		switch {
		case id != 0 && !of[m]:
		case at.IsZero():
			return at
		case at.After(last):
			last = at
		}
	}
	return last
}

// join makes c one of those whose packets a tenant's owner pays for.
func (n *Netcpu) join(t *tenant, c container.Container) {
	t.members[c.ID] = c
	n.member[c.ID] = t
}

// Prune implements feature.Feature. The uplinks go with the last container: if
// one comes later, Apply claims them again.
func (n *Netcpu) Prune(_ context.Context, alive func(container.ID) bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	out, err := n.outcomes(func(e journal.Entry) bool {
		switch {
		case e.Ref.Kind == qdisc.KindFilter:
			return n.hooks == nil || n.hooks.Stray(e)
		case e.Owner.Container == 0:
			return len(n.tenants) == 0
		}
		return !alive(container.ID(e.Owner.Container))
	})
	return errors.Join(err, kernel.Tidy(n.cfg.Roots, out))
}

// Close implements feature.Feature. Isolation stays; early drop ends, and with
// it the choice of the shape: packets stay as they are. Quotas and weights that
// charging has turned are put back.
func (n *Netcpu) Close() error {
	if !n.closed.Swap(true) {
		close(n.stop)
	}
	<-n.done
	var errs []error
	if n.charger != nil {
		errs = append(errs, n.charger.close())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	errs = append(errs, n.unwatchQueues())
	if n.guards != nil {
		for netns := range n.guards.of {
			errs = append(errs, n.unguard(netns))
		}
	}
	for _, t := range n.tenants {
		errs = append(errs, n.unwatch(t))
	}
	errs = append(errs, n.closeDoors(func(*door) bool { return true }))
	if n.early != nil {
		errs = append(errs, n.early.close())
		n.early, n.guards = nil, nil
	}
	if n.meter != nil {
		errs = append(errs, n.meter.Close())
	}
	return errors.Join(errs...)
}

// unwatch ends the early drop of a tenant.
func (n *Netcpu) unwatch(t *tenant) error {
	w := t.early
	if w == nil {
		return nil
	}
	t.early = nil
	return n.early.remove(w)
}

// undo restores whatever was changed on behalf of one container.
func (n *Netcpu) undo(id container.ID) error {
	mine := func(e journal.Entry) bool { return e.Owner.Container == uint64(id) }
	// The threads first, whenever they were first moved: a group that was made
	// later may hold them now.
	err := n.restore(func(e journal.Entry) bool { return e.Ref.Kind == sched.KindKthread && mine(e) })
	return errors.Join(err, n.restore(mine))
}

func (n *Netcpu) restore(match func(journal.Entry) bool) error {
	_, err := n.outcomes(match)
	return err
}

func (n *Netcpu) outcomes(match func(journal.Entry) bool) ([]journal.Outcome, error) {
	return n.cfg.Journal.Restore(kernel.Opener(n.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == name && match(e)
	})
}

// turn turns a knob on behalf of a container (0: of the host).
func (n *Netcpu) turn(k journal.Knob, value string, id container.ID) error {
	return n.cfg.Journal.TurnUntil(k, value, journal.Owner{Feature: name, Container: uint64(id)}, n.lapse(id))
}
