// Package traffic gives each container its bandwidth (CNTC): a guaranteed rate, an upper bound, a share
// by weight of the rest, and an order for idle bandwidth.
//
// It shapes what containers send through the uplinks and what they receive, with HTB, or with HFSC
// where policy bounds the latency. It is not a policer: a packet is dropped only when its queue is
// full. Package model does the arithmetic and kernel/qdisc makes the qdiscs; this package decides
// which container belongs to which class, and traffic.bpf.c does so for packets. Package agent
// calls it, as a feature.Feature. README.md lists what it changes on the host, and DESIGN.md says
// how it works.
package traffic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// name is the feature's name and the owner of its journal entries.
const name = "traffic"

// Config is the argument of New.
type Config struct {
	feature.Host

	// Uplinks names the devices to shape, each with its rate in bit/s; 0 is the rate of the driver.
	// Empty: all hardware that is up, and bonds.
	Uplinks map[string]uint64
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	// Delays always measures how long packets wait, for Read and Snapshot, while there is a tenant.
	// It slows down each packet at each root qdisc of the host.
	Delays bool
}

// Traffic is the feature. feature.Feature says how it may be called.
type Traffic struct {
	feature.Base
	cfg    Config
	hfsc   bool // the kernel supports it
	splits bool // packets can be cut into frames: the kernel has TBF
	find   *netdev.Finder

	measuring chan struct{} // holds one for each Measure

	mu         sync.Mutex
	host       *netdev.NS // nil once closed, or without support
	programs   *programs
	tenants    *tenant.Register // of the containers that policy gives bandwidth
	shaped     map[tenant.Key]*shaped
	uplinks    map[int]*uplink
	unreleased bool                    // undoing the uplinks failed after the last tenant: Remove tries again
	divides    map[Direction]bool      // directions in which uplinks have classes; Ingress packets pass IFBs
	watches    map[uint64]func() error // of namespaces with our devices or qdiscs: each function ends one
	forwards   bool                    // the sysctl was set for that, see forward
	forwarding dispute
	changed    func(container.ID) // see Notify
	done       chan struct{}      // closed by Close
	looking    feature.Loop
	meter      *delay.Meter         // nil unless delays are always measured
	cut        map[delay.Class]bool // classes that the meter cannot measure
	unmeasured string               // why some or all classes are not measured

	contends contention
}

// New probes the host. It changes nothing.
func New(cfg Config) (*Traffic, error) {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.NetNS = cmp.Or(cfg.NetNS, filepath.Join(cfg.Roots.Proc, "self", "ns", "net"))
	f := &Traffic{
		Base:    feature.Base{Called: name},
		cfg:     cfg,
		find:    netdev.NewFinder(cfg.Roots.Proc, time.Now),
		tenants: tenant.New(cfg.Roots.Proc, tenant.Network),
		shaped:  make(map[tenant.Key]*shaped),
		uplinks: make(map[int]*uplink),
		watches: make(map[uint64]func() error),

		measuring: make(chan struct{}, atOnce),
		done:      make(chan struct{}),
		looking:   feature.Loop{Name: "what is in force"},
	}
	f.Beside = []*feature.Loop{&f.looking}
	if os.Geteuid() != 0 {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "not root: devices cannot be changed", Mend: "run the agent as root"}
		return f, nil
	}
	var err error
	if f.host, err = netdev.Open(cfg.NetNS); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	if err := qdisc.Supported(qdisc.KindHTB); err != nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "no HTB: " + err.Error(), Mend: "a kernel with CONFIG_NET_SCH_HTB"}
		return f, nil
	}
	f.hfsc = qdisc.Supported(qdisc.KindHFSC) == nil
	f.splits = qdisc.Supported(qdisc.KindTBF) == nil
	if err = cfg.Ends.Err(); err == nil && cfg.Identity == nil {
		err = errors.New("there are no maps for it, and the agent's log says why")
	}
	if err == nil {
		v2 := ""
		if layout, err := cgroup.Detect(cfg.Roots.Proc, cfg.Roots.Cgroup); err == nil {
			v2 = layout.V2
		}
		f.programs, err = load(cfg.Identity.Maps(), v2)
	}
	if err != nil {
		f.Verdict = probe.Verdict{Level: probe.Unavailable, Why: "packets cannot be told apart: " + err.Error(), Mend: "a kernel with tcx (6.6 or later) or clsact"}
		return f, nil
	}
	f.Verdict = probe.Verdict{Level: probe.Full}
	go f.lookAgain(f.done)
	if cfg.Delays {
		if err := delay.Supported(); err != nil {
			f.cfg.Delays = false
			f.Verdict = probe.Verdict{Level: probe.Degraded, Why: err.Error() + "; the rest works", Mend: "a kernel with BTF, or an agent without --traffic-delays"}
		}
	}
	return f, nil
}

// Apply implements feature.Feature. It refuses a container with a *model.Refusal if an uplink cannot
// keep its promise, and with feature.ErrDisagree if it shares its network with a container that has
// another due; the state in force stays. It returns feature.ErrPartly if it has done all that this host
// allows, and a part of the container's due does not hold.
func (f *Traffic) Apply(ctx context.Context, t policy.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.follow()
	_, asks := dueOf(t)
	if f.programs == nil || f.host == nil {
		if asks {
			return fmt.Errorf("traffic: %s", f.Verdict.Why)
		}
		return nil
	}
	if err := f.programs.trust(t.Container.ID, slices.ContainsFunc(t.Container.Interfaces, func(dev container.Interface) bool { return unseen(dev.Kind) })); err != nil {
		return err
	}
	var err error
	if asks {
		err = f.shape(ctx, t)
	} else {
		err = f.remove(t.Container.ID)
	}
	if err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// shape gives one container its due, and adapts all others.
func (f *Traffic) shape(ctx context.Context, t policy.Target) error {
	in, left, err := f.tenants.Apply(t)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range left { // all of them: a tenant without members must not stay in f.shaped
		errs = append(errs, f.settle(l))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := f.depart(in); err != nil {
		return err
	}
	newcomer := slices.Contains(in.Change().Joined, t.Container.ID)
	a, err := f.admit(in, t.Container)
	if err != nil {
		if newcomer { // it must not obstruct the others
			err = errors.Join(err, f.remove(t.Container.ID))
		}
		return err
	}
	f.tenants.Settle(in)
	s := f.shaped[in.Key()]
	if asked(a.was[Ingress]) && !asked(s.due[Ingress]) {
		// Its packets leave the class first.
		if err := f.unlearn(s); err != nil {
			return err
		}
	}
	errs = []error{a.told}
	switch {
	case a.failed == nil: // the class first, so that no packet carries the number of a missing one
		errs = append(errs, f.enforce(a.plans))
	case f.needs(s, Egress) || f.needs(s, Ingress):
		errs = append(errs, a.failed)
	}
	if err := errors.Join(append(errs, f.identify(ctx, s))...); err != nil {
		return err
	}
	return f.unkept(s, a.missing)
}

// admission is the state to put in force for a member of a tenant.
type admission struct {
	was     due // in force until now
	plans   plans
	failed  error    // why the uplinks cannot be divided, with or without the member's due
	missing []string // uplinks that do not exist
	told    error    // why the programs do not recognise the member's sockets
}

// admit decides whether a member gets its due, which then becomes its tenant's due. It changes nothing
// that is in force. If the members disagree, or the uplinks cannot be divided because of this due, it
// returns an error, and the tenant keeps its old due.
func (f *Traffic) admit(in *tenant.Tenant, c container.Container) (a admission, err error) {
	agreed := tenant.AgreeFunc(in.Members(), dueOf, func(a, b due) bool { return reflect.DeepEqual(a, b) })
	if other, ok := agreed.Against(c.ID); ok {
		return a, fmt.Errorf("%w: container %s (%q); what is in force for them stays until theirs are the same", feature.ErrDisagree, other.ID, other.Name)
	}
	if a.missing, err = f.look(); err != nil {
		return a, err
	}
	slot, err := f.enroll(c)
	if slot == identity.Nobody {
		return a, err
	}
	a.told = err
	key := in.Key()
	s := f.shaped[key]
	made := s == nil
	if made {
		s = &shaped{Tenant: in, slot: slot, holds: make(map[spot]*hold)}
	}
	a.was, s.due, s.name = s.due, agreed.Value, c.Name
	f.shaped[key] = s
	a.plans, a.failed = f.plans()
	if a.failed == nil {
		return a, nil
	}
	s.due = a.was
	if made {
		delete(f.shaped, key)
	}
	if _, before := f.plans(); before == nil { // this due is the cause
		return a, a.failed
	}
	// The uplinks cannot be divided without this due either. Its veths enforce what they can.
	s.due, f.shaped[key] = agreed.Value, s
	return a, nil
}

// enroll gives a container's tenant its slot, and makes the programs recognise the container's sockets
// by its cgroup. An error with a slot concerns only the cgroup.
func (f *Traffic) enroll(c container.Container) (identity.Slot, error) {
	s, err := f.cfg.Identity.Tell(name, identity.Member{ID: c.ID, Tenant: c.TenantKey(), Cgroups: []uint64{uint64(c.ID)}})
	if s == identity.Nobody {
		return s, err
	}
	if err := errors.Join(err, f.programs.recognise(c.Cgroup.V2)); err != nil {
		return s, fmt.Errorf("tell packets by cgroup %d: %w", c.ID, err)
	}
	return s, nil
}

// enforce puts plans in force, and makes the programs classify packets where uplinks have classes.
// Packets leave a class before it is removed, and enter one after it is made.
func (f *Traffic) enforce(all plans) error {
	was := f.divides
	f.apart(func(way Direction) bool { return was[way] && all[way] != nil })
	err := f.bring(all)
	f.apart(func(way Direction) bool { return all[way] != nil })
	return err
}

// apart starts or stops the classification of packets, in the directions where uplinks have classes.
func (f *Traffic) apart(divides func(Direction) bool) {
	is := map[Direction]bool{Egress: divides(Egress), Ingress: divides(Ingress)}
	if is[Egress] == f.divides[Egress] && is[Ingress] == f.divides[Ingress] {
		return
	}
	f.divides = is
	for _, t := range f.shaped {
		f.reidentify(t) // its failure concerns this tenant alone
	}
}

// Remove implements feature.Feature.
func (f *Traffic) Remove(_ context.Context, id container.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.follow()
	if f.programs != nil {
		if err := f.programs.trust(id, false); err != nil {
			return err
		}
	}
	return f.remove(id)
}

func (f *Traffic) remove(id container.ID) error {
	var errs []error
	if f.unreleased && len(f.shaped) == 0 {
		errs = append(errs, f.release())
	}
	for _, t := range f.tenants.Remove(id) {
		errs = append(errs, f.settle(t))
	}
	return errors.Join(errs...)
}

// settle updates a tenant that containers have left. When the last one leaves, it removes everything of
// the tenant. It does not repeat what fails there, because the agent undoes the entries of containers
// that have ended.
func (f *Traffic) settle(t *tenant.Tenant) error {
	var errs []error
	s := f.shaped[t.Key()]
	ended := s != nil && len(t.Members()) == 0
	if ended {
		// First move its packets to the default class, then remove its classes.
		delete(f.shaped, t.Key())
		errs = append(errs, f.programs.setClass(s.slot, identity.Nobody), s.close(), f.withdraw(s, nil))
		if asked(s.due[Ingress]) {
			errs = append(errs, f.programs.forgetFlows())
		}
	}
	if err := f.depart(t); err != nil {
		errs = append(errs, err)
	} else {
		f.tenants.Settle(t)
	}
	switch {
	case !ended:
	case len(f.shaped) == 0:
		errs = append(errs, f.release())
	default:
		all, err := f.plans()
		if err == nil {
			err = f.enforce(all)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// depart forgets the containers that have left a tenant. A remaining member takes over their entries.
func (f *Traffic) depart(t *tenant.Tenant) error {
	for _, id := range t.Change().Left {
		if err := f.cfg.Identity.Forget(name, id); err != nil {
			return err
		}
		if len(t.Members()) == 0 {
			continue
		}
		if err := f.cfg.Journal.Reassign(func(e journal.Entry) bool {
			return e.Owner == journal.Owner{Feature: name, Container: uint64(id)}
		}, journal.Owner{Feature: name, Container: uint64(t.Owner())}); err != nil {
			return err
		}
	}
	return nil
}

// Prune implements feature.Feature. It undoes what an earlier agent left at the uplinks, unless Apply
// has adopted it.
func (f *Traffic) Prune(context.Context, func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.shaped) == 0 {
		return f.restore(nil)
	}
	var held []journal.Ref
	if f.forwards {
		held = append(held, qdisc.ForwardPriority(f.cfg.Roots.Proc, f.host).Ref())
	}
	for _, u := range f.uplinks {
		for _, h := range []*hold{u.out, u.in} {
			if h.claimed || h.ifb() && h.index != 0 {
				held = append(held, h.refs(f.host)...)
			}
		}
	}
	// The agent and Apply undo entries that belong to one container.
	return f.restore(func(e journal.Entry) bool {
		if e.Ref.Kind == qdisc.KindFilter {
			return f.cfg.Ends.Stray(e)
		}
		return e.Owner.Container == 0 && !slices.Contains(held, e.Ref)
	})
}

// Close implements feature.Feature. The qdiscs stay. Without the programs, all packets are in the
// default class.
func (f *Traffic) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for h := range f.all() {
		errs = append(errs, h.unsort())
	}
	for _, t := range f.shaped {
		errs = append(errs, t.close())
	}
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.shaped)
	f.tenants = tenant.New(f.cfg.Roots.Proc, tenant.Network)
	clear(f.uplinks)
	errs = append(errs, f.unwatch(), f.unfollow())
	if f.programs != nil {
		errs = append(errs, f.programs.Normalise.Close(), f.programs.object.Close())
		f.programs = nil
	}
	if f.host != nil {
		close(f.done)
		errs = append(errs, f.host.Close())
		f.host = nil
	}
	return errors.Join(errs...)
}

// Maps implements feature.Mapped.
func (f *Traffic) Maps() (list []bpf.Usage) {
	f.mu.Lock()
	p, m := f.programs, f.meter
	f.mu.Unlock()
	if p != nil {
		list = p.object.Usage()
	}
	if m != nil {
		list = append(list, m.Maps()...)
	}
	return list
}
