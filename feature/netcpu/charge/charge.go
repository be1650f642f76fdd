// Package charge implements the mode charge: a container's quota or weight follows the account of
// its packets, which package ledger keeps. Package netcpu decides which containers are charged, and
// drops packets.
package charge

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// cost sums the effect of packets on the CPU time of one container, since any moment.
type cost struct {
	Charge time.Duration // time of its packets that its own tasks did not spend
	Credit time.Duration // time of its own tasks that went into others' packets
	Took   time.Duration // time that its packets took from tasks that wanted to run
}

// since returns the growth since was. The growth of a sum that has fallen is 0: sums fall when the
// accounts are opened again.
func (c cost) since(was cost) cost {
	return cost{
		Charge: max(0, c.Charge-was.Charge), Credit: max(0, c.Credit-was.Credit), Took: max(0, c.Took-was.Took),
	}
}

func (c cost) plus(d cost) cost {
	return cost{Charge: c.Charge + d.Charge, Credit: c.Credit + d.Credit, Took: c.Took + d.Took}
}

// Config configures New.
type Config struct {
	Feature string // the owner of the journal entries
	Roots   kernel.Roots
	Layout  cgroup.Layout
	Journal *journal.Journal
	Failed  func(error) // logs the error of a turn of the loop, which may be nil

	Accounts func() (account.Reading, error) // of all containers
	// Credits says that the kernel charges a task for the softirqs that interrupt it. If it does not,
	// no task has paid for others, and there is nothing to credit.
	Credits bool
	// Allow sets the network time that a container may use before its incoming packets are dropped
	// (ledger.Unlimited: any time). The limit ends after lasts unless it is renewed. If Allow is nil,
	// no packets are dropped.
	Allow func(id container.ID, budget, lasts time.Duration) error
}

// Charger keeps the ledgers of the charged containers and writes their quotas and weights. It is safe
// for concurrent use. Close restores all limits, because only a Charger would raise a lowered quota
// again.
type Charger struct {
	cfg Config

	mu     sync.Mutex
	payers map[string]*payer // by cgroup of the cpu controller
	of     map[container.ID]*payer
	held   time.Time // when the changes were last renewed

	once       sync.Once
	first      chan struct{} // capacity 1: the first payer was added
	stop, done chan struct{} // stop loop, loop has ended
	Loop       feature.Loop  // shows whether loop hangs
}

// New makes a Charger and starts its loop.
func New(cfg Config) *Charger {
	ch := idle(cfg)
	go ch.loop()
	return ch
}

// idle makes a Charger without a running loop.
func idle(cfg Config) *Charger {
	return &Charger{
		cfg: cfg, payers: make(map[string]*payer), of: make(map[container.ID]*payer),
		Loop:  feature.Loop{Name: "quotas", Bound: feature.BehindCalls},
		first: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
}

// Add starts to charge a container. reserve is the part of its budget that remains when its packets
// begin to be dropped, from 0 (none remains) to below 1. A repeated Add changes only the reserve.
func (ch *Charger) Add(c container.Container, reserve float64) error {
	if !(reserve >= 0 && reserve < 1) {
		return fmt.Errorf("netcpu charge: a reserve of %v is not between 0 and 1", reserve)
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	dir, err := c.TenantGroup()
	if err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	if p := ch.of[c.ID]; p != nil && p.dir == dir {
		m := p.members[c.ID]
		m.Container, m.reserve = c, reserve
		p.members[c.ID] = m
		return nil
	} else if p != nil {
		if err := ch.drop(c.ID); err != nil { // the container was moved to another cgroup
			return fmt.Errorf("netcpu charge: %w", err)
		}
	}
	p := ch.payers[dir]
	if p == nil {
		// The owner did not set a value that an earlier agent left for a container of the pod. A
		// weight that isolation needs is set again within a second.
		if err := ch.restore(dir, func(o journal.Owner) bool { return o.Feature == ch.cfg.Feature }); err != nil {
			return fmt.Errorf("netcpu charge: %w", err)
		}
		if p, err = ch.newPayer(dir, c.TenantUsageGroup(), c.ID); err != nil {
			return fmt.Errorf("netcpu charge: %w", err)
		}
		ch.payers[dir] = p
		select {
		case ch.first <- struct{}{}:
		default:
		}
	}
	p.members[c.ID] = member{Container: c, reserve: reserve}
	ch.of[c.ID] = p
	return nil
}

// Renamed updates the directories of payers. called maps the old path of a cgroup to the present one.
func (ch *Charger) Renamed(called func(string) string) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	for _, p := range slices.Collect(maps.Values(ch.payers)) {
		delete(ch.payers, p.dir)
		p.dir = called(p.dir)
		p.usage = called(p.usage) // if there is only one hierarchy
		ch.payers[p.dir] = p
	}
}

// Has reports whether a container is charged.
func (ch *Charger) Has(id container.ID) bool {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.of[id] != nil
}

// Remove stops charging a container and restores its owner's settings.
func (ch *Charger) Remove(id container.ID) error {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.drop(id)
}

// drop forgets a container. It does so only after all changes for the container are restored, so that
// a retry still finds it.
func (ch *Charger) drop(id container.ID) error {
	p := ch.of[id]
	if p == nil {
		return nil
	}
	if p.owner == id {
		if err := ch.restore(p.dir, func(o journal.Owner) bool { return o == ch.by(id) }); err != nil {
			return err
		}
		p.restored()
	}
	delete(ch.of, id)
	delete(p.members, id)
	if len(p.members) == 0 {
		delete(ch.payers, p.dir)
	} else if p.owner == id { // the next member of the pod becomes the owner
		p.owner = slices.Min(slices.Collect(maps.Keys(p.members)))
	}
	if ch.cfg.Allow == nil {
		return nil
	}
	return ch.cfg.Allow(id, ledger.Unlimited, 0)
}

// Close removes all containers. A second Close does nothing.
func (ch *Charger) Close() error {
	ch.once.Do(func() { close(ch.stop) })
	<-ch.done
	ch.mu.Lock()
	defer ch.mu.Unlock()
	var errs []error
	for id := range ch.of {
		errs = append(errs, ch.drop(id))
	}
	return errors.Join(errs...)
}

// restore undoes the changes of a cgroup by matching owners.
func (ch *Charger) restore(dir string, of func(journal.Owner) bool) error {
	_, err := ch.cfg.Journal.Restore(kernel.Opener(ch.cfg.Roots), func(e journal.Entry) bool {
		return of(e.Owner) && e.Ref.Kind == cgroup.KindFile && filepath.Dir(e.Ref.Object) == dir
	})
	return err
}

// by returns the owner of a container's journal entries.
func (ch *Charger) by(id container.ID) journal.Owner {
	return journal.Owner{Feature: ch.cfg.Feature, Container: uint64(id)}
}

// loop steps the ledgers and writes their decisions when periods begin. It sleeps while no container
// is charged.
func (ch *Charger) loop() {
	defer close(ch.done)
	for {
		select {
		case <-ch.stop:
			return
		case <-ch.first:
		}
		ch.charge()
	}
}

// charge runs until no container is charged.
func (ch *Charger) charge() {
	at := time.Now() // the next round
	due := at        // the next round, look at the periods or write
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ch.stop:
			return
		case <-timer.C:
		}
		nap(due)
		if ch.none() {
			return
		}
		now := time.Now()
		var next time.Time
		ch.Loop.Turn(func() {
			var round, write error
			if !now.Before(at) {
				round = ch.round(now)
				// Rounds have fixed times, so that their intervals have the same length.
				for at = at.Add(law.Tick); !at.After(now); {
					at = at.Add(law.Tick)
				}
			}
			next, write = ch.write()
			ch.cfg.Failed(errors.Join(round, write))
		})
		if next.IsZero() || at.Before(next) {
			next = at
		}
		timer.Reset(time.Until(next) - grain)
		due = next
	}
}

// none reports whether no container is charged.
func (ch *Charger) none() bool {
	ch.Loop.Begin()
	defer ch.Loop.End()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return len(ch.payers) == 0
}

// lookEvery is the time between looks at the periods of a quota before a write, until their start is
// known. A write forgives the time that has run since the start of the period.
const lookEvery = 500 * time.Microsecond

// grain is the precision of the Go runtime's timers, which wait in a poll with a timeout in
// milliseconds.
const grain = 1500 * time.Microsecond

// nap sleeps until a time, with the precision of nanosleep(2).
func nap(until time.Time) {
	for {
		left := time.Until(until)
		if left <= 0 {
			return
		}
		ts := unix.NsecToTimespec(int64(min(left, 2*grain)))
		unix.Nanosleep(&ts, nil) // a signal ends it early
	}
}

// round steps each ledger once.
func (ch *Charger) round(now time.Time) error {
	ch.Loop.Begin()
	defer ch.Loop.End()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if len(ch.payers) == 0 {
		return nil
	}
	r, err := ch.cfg.Accounts()
	if err != nil {
		return err
	}
	sums := costs(r, ch.cfg.Credits)
	var errs []error
	shares := newShares(ch)
	for _, p := range ch.payers {
		if err := ch.step(p, sums, shares, now); !errors.Is(err, journal.ErrGone) { // else Remove follows
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, ch.hold(now))...)
}

// hold extends the expiry of the changes in force.
func (ch *Charger) hold(now time.Time) error {
	if now.Sub(ch.held) < law.Long/3 {
		return nil
	}
	ch.held = now
	return ch.cfg.Journal.Extend(func(e journal.Entry) bool {
		p := ch.payers[filepath.Dir(e.Ref.Object)]
		return e.Ref.Kind == cgroup.KindFile && p != nil && e.Owner == ch.by(p.owner)
	}, now.Add(law.Long))
}

// write makes the writes that are due. It returns the time of the next write or look at the periods,
// or zero if there is none.
func (ch *Charger) write() (next time.Time, err error) {
	ch.Loop.Begin()
	defer ch.Loop.End()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	var errs []error
	for _, p := range ch.payers {
		at, err := ch.writeQuota(p, time.Now())
		if !errors.Is(err, journal.ErrGone) {
			errs = append(errs, err)
		}
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next, errors.Join(errs...)
}

// Booked is the content of a ledger.
type Booked struct {
	ledger.State
	Factor float64 // limit in force, as a part of the owner's limit
}

// Ledgers returns the content of all ledgers, by the container that pays.
func (ch *Charger) Ledgers() map[container.ID]Booked {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	of := make(map[container.ID]Booked, len(ch.payers))
	for _, p := range ch.payers {
		s, factor := p.state()
		of[p.owner] = Booked{s, factor}
	}
	return of
}
