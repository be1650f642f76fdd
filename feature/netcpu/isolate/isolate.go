// Package isolate processes the packets that a container receives in the container's own share of
// the CPU. NAPI kernel threads in its cgroup poll its veths. Threads in the uplink cgroup poll the
// devices before them.
//
// It isolates the tenants with a member in the mode isolate. Package netcpu keeps the register of
// tenants, and holds the lock that an Isolator needs.
package isolate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// Config configures New.
type Config struct {
	Feature string // owner of the journal entries
	Key     string // the policy key of the mode: a change lapses with the decision about it
	Tenants *tenant.Register
	Roots   kernel.Roots
	Layout  cgroup.Layout
	Journal *journal.Journal
	Find    *netdev.Finder
	Uplinks *uplink.Finder

	// Throttled says that the kernel throttles kernel threads by the quota of their cgroup. If it does
	// not, a weight replaces the quota.
	Throttled bool

	Drop *drop.Dropper // nil if the kernel lacks it

	// QueueMin is the rate from which an uplink queue that serves a single container goes to that
	// container, in packets/s; 0: 1,000.
	QueueMin uint64
	// QueueFlood is the rate from which packets disturb others, in packets/s; 0: 50,000.
	QueueFlood uint64
}

// Isolator isolates tenants. It is not safe for concurrent use. Make it with New.
type Isolator struct {
	cfg      Config
	isolated map[tenant.Key]*isolation
	host     *uplinks  // nil while nothing is isolated
	looked   time.Time // last Glance
	worked   work      // last reading of pace
	around   around    // last reading of lookAround
	resting  restControl
	flooded  time.Time // last flood in deferPolls
	vacated  vacated
	dry      *[]feature.Step // for Plan: turn records its steps here and writes nothing; nil: turn writes
	held     held
	links    *netdev.Link // the first device in the list that changed read last

	unreleased bool // changes at uplinks are in force, but nothing is isolated: Release undoes them
}

// isolation is the state of one isolated tenant.
type isolation struct {
	of *tenant.Tenant
	// payer is the member that is charged for the tenant's packets, as Isolate last found it. It owns
	// the journal entries. It is the first member that asked for isolation. When it no longer asks,
	// the next member that asks takes over.
	payer   container.Container
	at      place // of its threads
	queues  bool  // it may own queues of uplinks
	threads []thread
	asked   int         // windows since renew last listed the tenant's NAPIs
	drops   *drop.Drops // nil without early drop
	control control
	counted flow   // last reading of Follow
	turns   uint64 // turns of its threads by the end of the last window; 0: unknown
	pacing  paceControl
	flow    flow          // last reading of pace
	alone   uint64        // packets from queues that it owns
	quota   float64       // CPUs, in the last window in which it might be paced; 0: none
	due     float64       // CPUs due beside its neighbours, from lookAround; 0: any number
	took    time.Duration // CPU time since lookAround
}

// asks reports whether policy asks to isolate a member of a tenant.
func asks(m policy.Target) bool { return m.Settings.NetCPU == policy.NetCPUIsolate }

// members returns the members of a tenant that ask for isolation.
func (s *isolation) members() []policy.Target {
	return slices.DeleteFunc(s.of.Members(), func(m policy.Target) bool { return !asks(m) })
}

// thread is a placed NAPI kernel thread.
type thread struct {
	sched.Thread
	device string
}

// New makes an Isolator. It changes nothing on the host.
func New(cfg Config) *Isolator {
	cfg.QueueMin, cfg.QueueFlood = cmp.Or(cfg.QueueMin, law.Rate), cmp.Or(cfg.QueueFlood, law.Flood)
	return &Isolator{cfg: cfg, isolated: make(map[tenant.Key]*isolation), held: make(held)}
}

// Isolate sets up the devices and threads of a tenant for c, a member that asks for isolation. A
// repeated call only repairs. The changes lapse with the last decision that isolates a member.
func (is *Isolator) Isolate(ctx context.Context, of *tenant.Tenant, c container.Container) error {
	if err := is.isolate(ctx, of, c); err != nil {
		return err
	}
	return is.Extend(is.isolated[of.Key()].payer.ID, 0)
}

func (is *Isolator) isolate(ctx context.Context, of *tenant.Tenant, c container.Container) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("netcpu isolate: %w", err)
		}
	}()
	s := is.isolated[of.Key()]
	if s != nil && s.payer.ID != c.ID {
		// One member pays for all, because the kernel finds a packet's socket only after the work.
		return nil
	}
	ns, err := is.open(c)
	if err != nil {
		return err
	}
	defer ns.Close() // an open namespace would outlive its container

	if s == nil {
		s = &isolation{of: of}
	}
	at, err := is.threadPlace(s, c)
	if err != nil {
		return err
	}
	if moved := s.at.group != "" && (s.at.group != at.group || s.at.cpuset != at.cpuset); moved {
		// No thread may stay in the old place. The tenant can earn its uplink queues again.
		if err := errors.Join(is.movedAlong(s.at.group, at.group), is.movedAlong(s.at.cpuset, at.cpuset), is.takeQueues(s)); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// Uplinks come first: until threads poll them, the softirqs of a flood also take the agent's time.
	claimed := is.claimUplinks(ctx, c)
	threads, err := is.bringVeths(ns, c, s.control.shape, at)
	if err == nil {
		err = is.heed(s, c)
	}
	if err != nil {
		is.unreleased = is.unreleased || is.Idle()
		return errors.Join(claimed, err)
	}
	s.payer, s.threads, s.at = c, threads, at
	is.isolated[of.Key()] = s
	// c now also pays for the packets of a charged member of the tenant.
	if s.drops, err = is.cfg.Drop.Begin(ns, of, c, false); err != nil {
		return errors.Join(claimed, err)
	}
	// Renew after Open: for XDP some drivers recreate their NAPIs, and so the threads.
	return errors.Join(claimed, is.cfg.Drop.Open(ctx, c), is.RenewUplinks(false))
}

// open opens the network namespace of a container.
func (is *Isolator) open(c container.Container) (*netdev.NS, error) {
	return is.cfg.Find.Open(filepath.Join(is.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
}

// Release ends the isolation of a container that has left a tenant or no longer asks for isolation.
// It undoes all changes for the container, including those of an earlier agent. of is nil if the
// container is in no tenant. If the container was the payer, the next member that asks for isolation
// takes over; ended reports that no member does.
func (is *Isolator) Release(ctx context.Context, of *tenant.Tenant, id container.ID) (ended bool, err error) {
	var s *isolation
	if of != nil {
		s = is.isolated[of.Key()]
	}
	pays := s != nil && s.payer.ID == id
	// Threads come first, because the runtime cannot remove the cgroup of an ended container while a
	// thread is in it. undo also undoes the changes of an earlier agent and of a failed Isolate.
	if pays {
		if err := is.takeQueues(s); err != nil {
			return false, err
		}
	}
	if err := is.undo(id); err != nil {
		return false, err
	}
	switch {
	case pays:
		delete(is.isolated, of.Key())
		err = is.cfg.Drop.End(of.Key())
		for _, m := range s.members() {
			if is.isolated[of.Key()] == nil {
				err = errors.Join(err, IgnoreGone(is.isolate(ctx, of, m.Container)))
			}
		}
		if is.Idle() {
			err = errors.Join(err, is.releaseUplinks())
		}
		if next := is.isolated[of.Key()]; next != nil {
			return false, errors.Join(err, is.Extend(id, next.payer.ID, 0))
		}
	case s != nil:
		return false, is.Extend(id, s.payer.ID, 0)
	case is.unreleased && is.Idle():
		err = is.releaseUplinks()
	}
	return pays, errors.Join(err, is.Extend(id, 0))
}

// Isolates reports whether a tenant is isolated.
func (is *Isolator) Isolates(of *tenant.Tenant) bool { return is.isolated[of.Key()] != nil }

// Idle reports whether no tenant is isolated.
func (is *Isolator) Idle() bool { return len(is.isolated) == 0 }

// threadPlace returns the place of a tenant's threads while c pays for them. On v1 it is the cgroup
// of the tenant.
//
// On v2 it is a child of that cgroup, named fairlead. A cgroup with threads could not delegate
// controllers, as a systemd in the container does, and a cgroup that delegates, like a pod's, may hold
// no threads. The tenant pays for the child's threads either way: without delegation the child has
// no share of its own, with it the child competes with the containers at the usual weight.
func (is *Isolator) threadPlace(s *isolation, c container.Container) (place, error) {
	dir, err := c.TenantGroup()
	at := place{group: dir, cpuset: c.Cgroup.CPUSet}
	if is.cfg.Drop != nil { // its counters decide the nice value
		at.nice = cmp.Or(s.at.nice, prompt)
	}
	if err != nil || !is.v2() {
		return at, err
	}
	// Without the controller, a cgroup further up that others share would pay.
	if _, err := cgroup.Weight(dir); err != nil {
		return at, fmt.Errorf("%s could not be charged for its packets: %w", dir, err)
	}
	at.group, at.child = filepath.Join(dir, "fairlead"), true
	return at, nil
}

func (is *Isolator) v2() bool { return is.cfg.Layout.CPU == is.cfg.Layout.V2 }

// Extend updates when the changes for containers lapse. Changes for the host (0) lapse with the last
// decision that isolates or charges a container. Entries that remain for a released container belong
// to the accounts, which do not end with a decision.
func (is *Isolator) Extend(of ...container.ID) error {
	var errs []error
	for _, id := range of {
		errs = append(errs, is.cfg.Journal.Extend(func(e journal.Entry) bool {
			return e.Owner == is.by(id) && e.Ref.Kind != netdev.KindDefer
		}, is.lapse(id)))
	}
	return errors.Join(errs...)
}

// lapse returns when the changes for a container (0: the host) lapse. The zero time is never: policy
// itself asks for the changes, or no decision does.
func (is *Isolator) lapse(id container.ID) (last time.Time) {
	for _, m := range is.neededBy(id) {
		at := m.Until(is.cfg.Key)
		if at.IsZero() {
			return at
		}
		if at.After(last) {
			last = at
		}
	}
	return last
}

// neededBy returns the containers that need the changes for a container (0: the host).
func (is *Isolator) neededBy(id container.ID) (list []policy.Target) {
	if id == 0 {
		for _, t := range is.cfg.Tenants.Tenants() {
			for _, m := range t.Members() {
				if asks(m) || m.Settings.NetCPU == policy.NetCPUCharge {
					list = append(list, m)
				}
			}
		}
		return list
	}
	of := is.cfg.Tenants.Of(id)
	if of == nil {
		return nil
	}
	s := is.isolated[of.Key()]
	needed := s != nil && s.payer.ID == id // the payer pays until another member takes over
	for _, m := range of.Members() {
		if asks(m) {
			list = append(list, m)
			needed = needed || m.Container.ID == id
		}
	}
	if !needed {
		return nil
	}
	return list
}

// undo restores all changes for one container.
func (is *Isolator) undo(id container.ID) error {
	mine := func(e journal.Entry) bool { return e.Owner.Container == uint64(id) }
	is.held.close(func(k heldFile) bool { return k.by == is.by(id) })
	open := kernel.Opener(is.cfg.Roots)
	// Threads come first, whatever the order of the entries: a group made later may hold them now.
	out, err := is.restored(open, func(e journal.Entry) bool { return e.Ref.Kind == sched.KindKthread && mine(e) })
	is.vacated.now = append(is.vacated.now, out...)
	_, rest := is.restored(open, mine)
	return errors.Join(err, rest)
}

func (is *Isolator) restore(match func(journal.Entry) bool) error {
	_, err := is.restored(kernel.Opener(is.cfg.Roots), match)
	return err
}

func (is *Isolator) restored(open journal.Opener, match func(journal.Entry) bool) ([]journal.Outcome, error) {
	if is.dry != nil {
		return nil, nil
	}
	return is.cfg.Journal.Restore(open, func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && match(e)
	})
}

// owned holds the owner and the expiry of changes, and records the knobs that were turned for them.
type owned struct {
	by     journal.Owner
	until  time.Time
	turned map[journal.Ref]bool
}

// owns returns the present owner and expiry of changes for a container (0: the host).
func (is *Isolator) owns(id container.ID) owned {
	return owned{is.by(id), is.lapse(id), make(map[journal.Ref]bool)}
}

// turn carries out a plan.
func (is *Isolator) turn(plan []journal.Setting, as owned) error {
	if is.dry != nil {
		return is.note(plan)
	}
	for _, s := range plan {
		as.turned[s.Ref()] = true
	}
	return is.cfg.Journal.TurnAll(plan, as.by, as.until)
}

// by returns the owner of a container's knobs.
func (is *Isolator) by(id container.ID) journal.Owner {
	return journal.Owner{Feature: is.cfg.Feature, Container: uint64(id)}
}

// IgnoreGone drops errors about objects that have gone. They went with a container, and a new list of
// devices is about to come.
func IgnoreGone(err error) error {
	if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) || errors.Is(err, netdev.ErrNoNS) || errors.Is(err, errNoNAPI) {
		return nil
	}
	return err
}

// releaseUplinks undoes the changes on the host.
func (is *Isolator) releaseUplinks() error {
	err := is.forgetQueues()
	is.forgetAround()
	is.host, is.resting, is.worked = nil, restControl{}, work{}
	is.held.close(func(heldFile) bool { return true })
	err = errors.Join(err, is.restore(func(e journal.Entry) bool { return e.Owner.Container == 0 && e.Ref.Kind != qdisc.KindFilter }))
	is.unreleased = err != nil
	return err
}
