// Package isolate processes the packets that a container receives in the container's own share of
// the CPU: by NAPI kernel threads in its cgroup, while threads in a group of their own poll what
// comes before the container.
//
// Package netcpu decides which containers that are, and holds the lock that an Isolator needs.
package isolate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Config is what New needs.
type Config struct {
	Feature string // owner of the journal entries
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
}

// Isolator isolates containers. It is not safe for concurrent use. Make it with New.
type Isolator struct {
	cfg     Config
	tenants map[uint64]*tenant       // by network namespace
	member  map[container.ID]*tenant // each container that is isolated
	expiry  map[container.ID]time.Time
	host    *uplinks                   // nil while nothing is isolated
	needs   map[container.ID]time.Time // other containers that need the changes on the host, until when
	looked  time.Time
	windows uint64 // of reweigh

	ran atomic.Pointer[map[container.ID]time.Duration] // of takeTurns
}

// tenant is one network namespace, which may be shared. One cgroup is charged for its packets.
type tenant struct {
	netns   uint64
	owner   container.ID // the owner of that cgroup
	at      place        // of its threads
	queues  bool         // it may have queues of uplinks
	members map[container.ID]container.Container
	threads []thread
	asking  asking
	drops   *drop.Tenant // nil without early drop
	control control
	counted counted
	turns   turnControl
	taken   taken
}

// thread is a placed NAPI kernel thread.
type thread struct {
	sched.Thread
	device string
}

// New makes an Isolator. It changes nothing.
func New(cfg Config) *Isolator {
	if cfg.QueueMin == 0 {
		cfg.QueueMin = queueMin
	}
	return &Isolator{
		cfg: cfg, tenants: make(map[uint64]*tenant), member: make(map[container.ID]*tenant), expiry: make(map[container.ID]time.Time),
		needs: make(map[container.ID]time.Time),
	}
}

// Isolate places one container's devices and threads. It may be repeated at any time and then only
// repairs. Its changes lapse at expiry; zero is never.
func (is *Isolator) Isolate(ctx context.Context, c container.Container, expiry time.Time) error {
	is.expiry[c.ID] = expiry
	if err := is.isolate(ctx, c); err != nil {
		return err
	}
	return is.settle(is.member[c.ID])
}

// settle updates what depends on the containers of a namespace. The changes for a tenant, and for
// the host, lapse with the last container that they are for, or never if one has no expiry.
func (is *Isolator) settle(t *tenant) error {
	return errors.Join(is.extend(t.owner), is.extend(0))
}

func (is *Isolator) isolate(ctx context.Context, c container.Container) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("netcpu isolate: %w", err)
		}
	}()
	t := is.tenants[c.NetNS]
	if t != nil && t.owner != c.ID {
		// The first container of the namespace is charged, as the kernel learns a packet's socket
		// only after the work.
		is.join(t, c)
		return nil
	}
	ns, err := is.open(c)
	if err != nil {
		return err
	}
	defer ns.Close() // an open namespace would outlive its container

	if t == nil {
		t = &tenant{netns: c.NetNS, owner: c.ID, members: make(map[container.ID]container.Container)}
	}
	pays, err := c.TenantGroup()
	if err != nil {
		return err
	}
	at, err := is.threadPlace(pays, c.Cgroup.CPUSet)
	if err != nil {
		return err
	}
	at.nice = is.niceOf(t)
	if moved := t.at.group != "" && (t.at.group != at.group || t.at.cpuset != at.cpuset); moved {
		// Nothing may stay in the old place. It can earn its queues of the uplinks again.
		if err := errors.Join(is.movedAlong(t.at.group, at.group), is.movedAlong(t.at.cpuset, at.cpuset), is.takeQueues(t)); err != nil {
			return err
		}
	}
	var threads []thread
	var skipped []error
	for _, dev := range c.Interfaces {
		if err := ctx.Err(); err != nil {
			return err
		}
		if !dev.HasHostEnd() {
			skipped = append(skipped, fmt.Errorf("%s: %w", dev.Name, errNoHostEnd))
			continue
		}
		polling, err := is.bringVeth(ns, dev, t.control.shape, at, c.ID)
		if err != nil {
			return fmt.Errorf("%s: %w", dev.Name, err)
		}
		threads = append(threads, polling...)
	}
	if err := is.restore(func(e journal.Entry) bool { return e.Owner == is.by(c.ID) && stale(e, c, at, pays, threads) }); err != nil {
		return err
	}
	if len(threads) == 0 && len(skipped) > 0 {
		return errors.Join(skipped...)
	}
	if err := is.Weigh(c); err != nil {
		return err
	}
	if err := is.allowQueues(t, c); err != nil {
		return err
	}
	t.threads, t.at = threads, at
	is.tenants[c.NetNS] = t
	is.join(t, c)
	// From now on it pays for the packets of a charged one in the same namespace.
	if t.drops, err = is.cfg.Drop.Begin(ns, c, false); err != nil {
		return err
	}
	// In this order: some drivers recreate their NAPIs, and so the threads, for XDP.
	return errors.Join(is.cfg.Drop.Open(ctx, c), is.RenewUplinks(), is.claimUplinks(ctx, c))
}

// open opens the network namespace of a container.
func (is *Isolator) open(c container.Container) (*netdev.NS, error) {
	return is.cfg.Find.Open(filepath.Join(is.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
}

// errNoHostEnd explains why a device cannot be isolated: the device below a macvlan polls it,
// together with the packets of all others.
var errNoHostEnd = errors.New("no veth with a host end that can be found: it has no polling of its own to move")

// Release ends isolation, and undoes all changes for a container, also those of an earlier agent.
// If the container paid for a namespace with other members, the next of them takes over. Otherwise
// free is that namespace; 0: none is.
func (is *Isolator) Release(ctx context.Context, id container.ID) (free uint64, err error) {
	delete(is.expiry, id)
	// This comes first, as a thread that stays in the cgroup of an ended container keeps the
	// runtime from removing it. It also undoes what an earlier agent, or a failed Isolate, left.
	t := is.member[id]
	if t != nil && t.owner == id {
		if err := is.takeQueues(t); err != nil {
			return 0, err
		}
	}
	if err := is.undo(id); err != nil {
		return 0, err
	}
	delete(is.member, id)
	// The rest belongs to the accounts, which do not end with a decision.
	if err := is.extend(id); err != nil || t == nil {
		return 0, err
	}
	delete(t.members, id)
	if t.owner != id {
		return 0, is.settle(t)
	}
	delete(is.tenants, t.netns)
	err = is.cfg.Drop.End(t.netns)
	for m, c := range t.members {
		delete(is.member, m)
		if next := is.tenants[t.netns]; next != nil {
			is.join(next, c)
			continue
		}
		err = errors.Join(err, IgnoreGone(is.isolate(ctx, c)))
	}
	if len(is.tenants) == 0 {
		err = errors.Join(err, is.releaseUplinks())
	}
	if next := is.tenants[t.netns]; next != nil {
		return 0, errors.Join(err, is.settle(next))
	}
	return t.netns, errors.Join(err, is.extend(0))
}

// Isolates reports whether any container of a network namespace is isolated.
func (is *Isolator) Isolates(netns uint64) bool { return is.tenants[netns] != nil }

// Idle reports whether no container is isolated.
func (is *Isolator) Idle() bool { return len(is.tenants) == 0 }

// join adds c to the containers that a tenant's owner pays for.
func (is *Isolator) join(t *tenant, c container.Container) {
	t.members[c.ID] = c
	is.member[c.ID] = t
}

// threadPlace returns the place of a container's threads; dir is the group of its tenant. On v1 it
// is dir.
//
// On v2 it is a child of dir, named fairlead. A group with threads in it could no longer delegate
// controllers, as a systemd inside the container needs; and a group that does so, like a pod's, may
// hold none. Either way the tenant pays for the child's threads: in the first case the child has no
// share of its own, in the second it competes with the containers at the usual weight.
func (is *Isolator) threadPlace(dir, cpuset string) (place, error) {
	at := place{group: dir, cpuset: cpuset}
	if !is.v2() {
		return at, nil
	}
	// Without the controller a group further up, which others share, would pay.
	if _, err := cgroup.Weight(dir); err != nil {
		return at, fmt.Errorf("%s could not be charged for its packets: %w", dir, err)
	}
	at.group, at.child = filepath.Join(dir, "fairlead"), true
	return at, nil
}

func (is *Isolator) v2() bool { return is.cfg.Layout.CPU == is.cfg.Layout.V2 }

// Need registers that a container which is not isolated needs the changes on the host, until a
// time; zero is for ever.
func (is *Isolator) Need(id container.ID, until time.Time) error {
	is.needs[id] = until
	return is.extend(0)
}

// Spare undoes Need.
func (is *Isolator) Spare(id container.ID) error {
	delete(is.needs, id)
	return is.extend(0)
}

func (is *Isolator) extend(id container.ID) error {
	return is.cfg.Journal.Extend(func(e journal.Entry) bool {
		return e.Owner == is.by(id)
	}, is.lapse(id))
}

// lapse returns when the changes for a container lapse; 0 is the host.
func (is *Isolator) lapse(id container.ID) (last time.Time) {
	of := map[container.ID]bool{id: true}
	if t := is.member[id]; t != nil {
		for m := range t.members {
			of[m] = true
		}
	}
	for m, at := range is.expiry {
		switch {
		case id != 0 && !of[m]:
		case at.IsZero():
			return at
		case at.After(last):
			last = at
		}
	}
	if id != 0 {
		return last
	}
	for _, at := range is.needs {
		if at.IsZero() {
			return at
		}
		if at.After(last) {
			last = at
		}
	}
	return last
}

// undo restores all changes for one container.
func (is *Isolator) undo(id container.ID) error {
	mine := func(e journal.Entry) bool { return e.Owner.Container == uint64(id) }
	// The threads first, in any order of moves: a group made later may hold them now.
	err := is.restore(func(e journal.Entry) bool { return e.Ref.Kind == sched.KindKthread && mine(e) })
	return errors.Join(err, is.restore(mine))
}

func (is *Isolator) restore(match func(journal.Entry) bool) error {
	_, err := is.cfg.Journal.Restore(kernel.Opener(is.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && match(e)
	})
	return err
}

// turn carries out a plan for a container (0: the host).
func (is *Isolator) turn(plan []journal.Setting, id container.ID) error {
	return is.cfg.Journal.TurnAll(plan, is.by(id), is.lapse(id))
}

// by returns the owner of a container's knobs.
func (is *Isolator) by(id container.ID) journal.Owner {
	return journal.Owner{Feature: is.cfg.Feature, Container: uint64(id)}
}

// IgnoreGone drops errors of what has gone with a container that shared it: the next list of
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
	is.host = nil
	return errors.Join(err, is.restore(func(e journal.Entry) bool { return e.Owner.Container == 0 && e.Ref.Kind != qdisc.KindFilter }))
}
