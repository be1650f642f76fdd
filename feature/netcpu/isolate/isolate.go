// Package isolate processes the packets that a container receives in the container's own share of
// the CPU: by NAPI kernel threads in its cgroup, while threads in a group of their own poll what
// comes before the container.
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

// Config is what New needs.
type Config struct {
	Feature string // owner of the journal entries
	Key     string // the policy key of the mode: a change lapses with the decision about it
	Tenants *tenant.Register
	Roots   kernel.Roots
	Layout  cgroup.Layout
	Journal *journal.Journal
	Find    *netdev.Finder
	Uplinks *uplink.Finder

	// Throttled: the kernel stops a kernel thread when its group has used up its quota; otherwise
	// weight replaces that.
	Throttled bool

	Drop *drop.Dropper // nil if the kernel lacks it

	// QueueMin is the packet rate above which an uplink queue that serves a single container is
	// assigned to it, in packets/s; 0: 1,000.
	QueueMin uint64
	// QueueFlood is the rate that others feel, in packets/s; 0: 50,000.
	QueueFlood uint64
}

// Isolator isolates tenants. It is not safe for concurrent use. Make it with New.
type Isolator struct {
	cfg      Config
	isolated map[tenant.Key]*isolation
	host     *uplinks  // nil while nothing is isolated
	looked   time.Time // by Glance
	worked   work      // by pace
	around   around    // by lookAround
	resting  restControl
	flooded  time.Time // last, by deferPolls
	vacated  vacated
	dry      *[]feature.Step // of Plan: what turn would write, and does not; nil: it does
	held     held
	links    *netdev.Link // the first of the host's devices, as of changed

	unreleased bool // the uplinks' changes are in force and nothing is isolated: Release undoes them
}

// isolation is what is in force for one tenant.
type isolation struct {
	of *tenant.Tenant
	// payer is the member that is charged for the tenant's packets, as Isolate last found it, and
	// the owner of the journal entries. It is the first that asked for isolation. When it no longer
	// asks, the next member that does takes over.
	payer   container.Container
	at      place // of its threads
	queues  bool  // it may have queues of uplinks
	threads []thread
	asked   int         // windows since renew has listed its NAPIs
	drops   *drop.Drops // nil without early drop
	control control
	counted flow   // by Follow
	turns   uint64 // that the threads had at the end of the last window; 0: not known
	pacing  paceControl
	flow    flow          // by pace
	alone   uint64        // packets that came by queues of its own
	quota   float64       // CPUs, as of the last window in which it might be paced; 0: none
	due     float64       // CPUs beside its neighbours, as of lookAround; 0: any
	took    time.Duration // since then
}

// asks reports whether policy isolates a member of a tenant.
func asks(m policy.Target) bool { return m.Settings.NetCPU == policy.NetCPUIsolate }

// members returns the members of a tenant that are isolated.
func (s *isolation) members() []policy.Target {
	return slices.DeleteFunc(s.of.Members(), func(m policy.Target) bool { return !asks(m) })
}

// thread is a placed NAPI kernel thread.
type thread struct {
	sched.Thread
	device string
}

// New makes an Isolator. It changes nothing.
func New(cfg Config) *Isolator {
	cfg.QueueMin, cfg.QueueFlood = cmp.Or(cfg.QueueMin, law.Rate), cmp.Or(cfg.QueueFlood, law.Flood)
	return &Isolator{cfg: cfg, isolated: make(map[tenant.Key]*isolation), held: make(held)}
}

// Isolate places the devices and threads of a tenant for c, a member that asks for it. It may be
// repeated at any time and then only repairs. Its changes lapse with the last of the decisions that
// isolate members.
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
		// One member is charged for all, as the kernel learns a packet's socket only after the work.
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
		// Nothing may stay in the old place. It can earn its queues of the uplinks again.
		if err := errors.Join(is.movedAlong(s.at.group, at.group), is.movedAlong(s.at.cpuset, at.cpuset), is.takeQueues(s)); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// The uplinks first: until threads poll them, the softirqs of a flood take the agent's time, too.
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
	// From now on it pays for the packets of a charged member of the tenant.
	if s.drops, err = is.cfg.Drop.Begin(ns, of, c, false); err != nil {
		return errors.Join(claimed, err)
	}
	// In this order: some drivers recreate their NAPIs, and so the threads, for XDP.
	return errors.Join(claimed, is.cfg.Drop.Open(ctx, c), is.RenewUplinks(false))
}

// open opens the network namespace of a container.
func (is *Isolator) open(c container.Container) (*netdev.NS, error) {
	return is.cfg.Find.Open(filepath.Join(is.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
}

// Release ends isolation of a container that has left a tenant, or no longer asks for isolation
// there, and undoes all changes for it, also those of an earlier agent. of is nil for a container
// that is in no tenant. If it was the payer, the next member that asks for isolation takes over;
// ended reports that there is none.
func (is *Isolator) Release(ctx context.Context, of *tenant.Tenant, id container.ID) (ended bool, err error) {
	var s *isolation
	if of != nil {
		s = is.isolated[of.Key()]
	}
	pays := s != nil && s.payer.ID == id
	// This comes first, as a thread that stays in the cgroup of an ended container keeps the
	// runtime from removing it. It also undoes what an earlier agent, or a failed Isolate, left.
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

// threadPlace returns the place of a tenant's threads while c pays for them: on v1 the group of the
// tenant.
//
// On v2 it is a child of that, named fairlead. A group with threads in it could no longer delegate
// controllers, as a systemd inside the container needs; and a group that does so, like a pod's, may
// hold none. Either way the tenant pays for the child's threads: in the first case the child has no
// share of its own, in the second it competes with the containers at the usual weight.
func (is *Isolator) threadPlace(s *isolation, c container.Container) (place, error) {
	dir, err := c.TenantGroup()
	at := place{group: dir, cpuset: c.Cgroup.CPUSet}
	if is.cfg.Drop != nil { // there are counters to choose by
		at.nice = cmp.Or(s.at.nice, prompt)
	}
	if err != nil || !is.v2() {
		return at, err
	}
	// Without the controller a group further up, which others share, would pay.
	if _, err := cgroup.Weight(dir); err != nil {
		return at, fmt.Errorf("%s could not be charged for its packets: %w", dir, err)
	}
	at.group, at.child = filepath.Join(dir, "fairlead"), true
	return at, nil
}

func (is *Isolator) v2() bool { return is.cfg.Layout.CPU == is.cfg.Layout.V2 }

// Extend updates when the changes for containers lapse; 0 is the host, whose changes lapse with the last of the
// decisions that isolate or charge containers. What is left of a released one belongs to the accounts,
// which do not end with a decision.
func (is *Isolator) Extend(of ...container.ID) error {
	var errs []error
	for _, id := range of {
		errs = append(errs, is.cfg.Journal.Extend(func(e journal.Entry) bool {
			return e.Owner == is.by(id) && e.Ref.Kind != netdev.KindDefer
		}, is.lapse(id)))
	}
	return errors.Join(errs...)
}

// lapse returns when the changes for a container lapse; 0 is the host. Zero is never: policy itself
// asks for them, or no decision does.
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

// neededBy returns the containers that the changes for a container, or for the host, are for.
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
	needed := s != nil && s.payer.ID == id // it pays until another takes over
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
	// The threads first, in any order of moves: a group made later may hold them now.
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

// owned is whose the changes for a container are, when they lapse, and the knobs that were turned so.
type owned struct {
	by     journal.Owner
	until  time.Time
	turned map[journal.Ref]bool
}

// owns returns these for a container (0: the host), as of now.
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

// IgnoreGone drops errors about objects that have gone with a container that shared them: the next
// list of devices is about to come.
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
