// Package isolate has the packets that a container receives worked on in the
// container's own share of the CPU: by NAPI kernel threads in its cgroup, while what
// comes before the container is polled by threads in a group of its own.
//
// It decides nothing about which container that is: package netcpu does, and holds
// the lock that an Isolator needs.
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
	Feature string // the owner of the notes
	Roots   kernel.Roots
	Layout  cgroup.Layout
	Journal *journal.Journal
	Find    *netdev.Finder
	Uplinks *uplink.Finder

	// Throttled says that the kernel stops a kernel thread whose group has used up
	// its quota; where it does not, weight has to do it.
	Throttled bool

	Drop *drop.Dropper // nil where the kernel cannot

	// QueueMin is how many packets per second make a queue of an uplink worth giving
	// to the container whose they all are; 0: 1,000.
	QueueMin uint64
}

// Isolator isolates containers. It is not safe for concurrent use. Make it with New.
type Isolator struct {
	cfg     Config
	tenants map[uint64]*tenant       // by network namespace
	member  map[container.ID]*tenant // each container that is isolated
	expiry  map[container.ID]time.Time
	host    *uplinks                   // nil while nothing is isolated
	needs   map[container.ID]time.Time // who else needs what is changed on the host, until when
	looked  time.Time
	windows uint64 // of reweigh

	ran atomic.Pointer[map[container.ID]time.Duration] // of takeTurns
}

// tenant is one network namespace, whose packets are charged to one cgroup
// however many containers share it.
type tenant struct {
	netns   uint64
	owner   container.ID // whose cgroup that is
	at      place        // where its threads are
	queues  bool         // whether queues of uplinks may be given to it
	members map[container.ID]container.Container
	threads []thread
	asking  asking
	drops   *drop.Tenant // nil without early drop
	control control
	counted counted
	turns   turnControl
	taken   taken
}

// thread is a NAPI kernel thread that was placed.
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

// Isolate brings one container's devices and threads to where they belong. It
// may be called again at any time and then only repairs. What it changes lapses at
// expiry; zero is never.
func (is *Isolator) Isolate(ctx context.Context, c container.Container, expiry time.Time) error {
	is.expiry[c.ID] = expiry
	if err := is.isolate(ctx, c); err != nil {
		return err
	}
	return is.settle(is.member[c.ID])
}

// settle brings what depends on who is in a namespace to what that is now. What was
// changed for a tenant, and for all of them, lapses when the last of those lapses for
// whom it was; never if one of them does not.
func (is *Isolator) settle(t *tenant) error {
	return errors.Join(is.cfg.Drop.Bill(t.netns), is.extend(t.owner), is.extend(0))
}

func (is *Isolator) isolate(ctx context.Context, c container.Container) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("netcpu isolate: %w", err)
		}
	}()
	t := is.tenants[c.NetNS]
	if t != nil && t.owner != c.ID {
		// The namespace is charged to the container that was first in it, as
		// the kernel cannot tell whose socket a packet is for before it has
		// done the work.
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
		// Nothing may be left where it was. What it had of the uplinks it can
		// earn again.
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
	// One that is charged in the same namespace has its packets paid for now.
	if t.drops, err = is.cfg.Drop.Begin(ns, c, false); err != nil {
		return err
	}
	// In this order: some drivers make their NAPIs, and so the threads, anew for XDP.
	return errors.Join(is.cfg.Drop.Open(ctx, c), is.RenewUplinks(), is.claimUplinks(ctx, c))
}

// open opens the network namespace of a container.
func (is *Isolator) open(c container.Container) (*netdev.NS, error) {
	return is.cfg.Find.Open(filepath.Join(is.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
}

// errNoHostEnd says why a device cannot be isolated: a macvlan is polled by the
// device below it, together with everybody else's packets.
var errNoHostEnd = errors.New("no veth with a host end that can be found: it has no polling of its own to move")

// Release ends isolation, and undoes whatever is in force on behalf of a container,
// be it of an earlier agent. If the container paid for a namespace that others are
// still in, the next of them takes over. Else free is that namespace; 0: none is.
func (is *Isolator) Release(ctx context.Context, id container.ID) (free uint64, err error) {
	delete(is.expiry, id)
	// First of all, as a thread that stays in the cgroup of a container which
	// has ended keeps the runtime from removing it. It is also for what an
	// earlier agent, or an Isolate that failed, has left.
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
	// What is left is of the accounts, which do not end with a decision.
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

// Isolates says whether a container of a network namespace is isolated.
func (is *Isolator) Isolates(netns uint64) bool { return is.tenants[netns] != nil }

// Idle says that no container is isolated.
func (is *Isolator) Idle() bool { return len(is.tenants) == 0 }

// join makes c one of those whose packets a tenant's owner pays for.
func (is *Isolator) join(t *tenant, c container.Container) {
	t.members[c.ID] = c
	is.member[c.ID] = t
}

// threadPlace returns where the threads of a container go, whose tenant's group is dir.
// On v1 they go there.
//
// On v2 it is a child of that, named fairlead. A group with threads in it could no
// longer hand controllers down, as a systemd inside the container wants its own
// to; and one that does so, as a pod's, may hold none. What the child's threads do
// is the tenant's in both cases: in the first the child has no share of its own,
// in the second it competes with the containers at the usual weight.
func (is *Isolator) threadPlace(dir, cpuset string) (place, error) {
	at := place{group: dir, cpuset: cpuset}
	if !is.v2() {
		return at, nil
	}
	// Without the controller the time would be a group's further up, which
	// others share.
	if _, err := cgroup.Weight(dir); err != nil {
		return at, fmt.Errorf("%s could not be charged for its packets: %w", dir, err)
	}
	at.group, at.child = filepath.Join(dir, "fairlead"), true
	return at, nil
}

func (is *Isolator) v2() bool { return is.cfg.Layout.CPU == is.cfg.Layout.V2 }

// Need says that a container which is not isolated needs what is changed on the host,
// until a time; zero is for ever.
func (is *Isolator) Need(id container.ID, until time.Time) error {
	is.needs[id] = until
	return is.extend(0)
}

// Spare ends that.
func (is *Isolator) Spare(id container.ID) error {
	delete(is.needs, id)
	return is.extend(0)
}

func (is *Isolator) extend(id container.ID) error {
	return is.cfg.Journal.Extend(func(e journal.Entry) bool {
		return e.Owner == is.by(id)
	}, is.lapse(id))
}

// lapse is when what is changed on behalf of a container lapses; 0 is the host.
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

// undo restores whatever was changed on behalf of one container.
func (is *Isolator) undo(id container.ID) error {
	mine := func(e journal.Entry) bool { return e.Owner.Container == uint64(id) }
	// The threads first, whenever they were first moved: a group that was made
	// later may hold them now.
	err := is.restore(func(e journal.Entry) bool { return e.Ref.Kind == sched.KindKthread && mine(e) })
	return errors.Join(err, is.restore(mine))
}

func (is *Isolator) restore(match func(journal.Entry) bool) error {
	_, err := is.cfg.Journal.Restore(kernel.Opener(is.cfg.Roots), func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && match(e)
	})
	return err
}

// turn carries out a plan on behalf of a container (0: of the host).
func (is *Isolator) turn(plan []journal.Setting, id container.ID) error {
	return is.cfg.Journal.TurnAll(plan, is.by(id), is.lapse(id))
}

// by is who turns the knobs of a container.
func (is *Isolator) by(id container.ID) journal.Owner {
	return journal.Owner{Feature: is.cfg.Feature, Container: uint64(id)}
}

// IgnoreGone leaves out errors of what has gone with a container that shared it:
// the next list of devices is about to come.
func IgnoreGone(err error) error {
	if errors.Is(err, journal.ErrGone) || errors.Is(err, netdev.ErrNoLink) || errors.Is(err, netdev.ErrNoNS) || errors.Is(err, errNoNAPI) {
		return nil
	}
	return err
}

// releaseUplinks undoes what is changed on the host.
func (is *Isolator) releaseUplinks() error {
	err := is.forgetQueues()
	is.host = nil
	return errors.Join(err, is.restore(func(e journal.Entry) bool { return e.Owner.Container == 0 && e.Ref.Kind != qdisc.KindFilter }))
}
