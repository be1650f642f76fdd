// Package charge puts the mode charge into force: the quota or the weight of a
// container follows the account of its packets, kept by package ledger. It decides
// nothing about which container is charged, and drops no packets itself; package
// netcpu tells it the one and does the other.
package charge

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Cost is what packets did to the CPU time of one container, in sums since any
// moment.
type Cost struct {
	Charge time.Duration // network time on its behalf that was not its own tasks'
	Credit time.Duration // time of its own tasks that went into others' packets
	Took   time.Duration // time that its packets took from whoever wanted to run
}

// since is what has come since was; nothing where sums went back, as those of
// accounts that were opened again do.
func (c Cost) since(was Cost) Cost {
	return Cost{
		Charge: max(0, c.Charge-was.Charge), Credit: max(0, c.Credit-was.Credit), Took: max(0, c.Took-was.Took),
	}
}

func (c Cost) plus(d Cost) Cost {
	return Cost{Charge: c.Charge + d.Charge, Credit: c.Credit + d.Credit, Took: c.Took + d.Took}
}

// Config is what New needs.
type Config struct {
	Feature string // the owner of the notes
	Roots   kernel.Roots
	Layout  cgroup.Layout
	Journal *journal.Journal
	Log     *slog.Logger

	// Read gives the sums of all containers. One that is missing has none.
	Read func() (map[container.ID]Cost, error)
	// Allow tells how much network time a container may use up from now on before
	// its incoming packets are to be dropped (ledger.Unlimited: any), and for how long
	// that counts unless it is told anew. It may be nil: nothing is dropped.
	Allow func(id container.ID, budget, lasts time.Duration) error
}

// Charger keeps the ledgers of the containers that are charged, and turns their
// quotas and weights. It is safe for concurrent use. A quota that it has
// lowered is nothing without it, so that Close puts everything back.
type Charger struct {
	cfg Config

	mu     sync.Mutex
	payers map[string]*payer // by cgroup of the cpu controller
	of     map[container.ID]*payer
	held   time.Time  // when what is in force was last made to hold on
	unread logLimiter // why the costs could not be read

	once       sync.Once
	stop, done chan struct{} // of loop
	turn       feature.Loop
}

// every is how often the ledgers are stepped: two usual periods, so that
// each interval holds as many quotas as the one before.
const every = 200 * time.Millisecond

// holdsFor is how long a quota or weight counts that nobody makes hold on: a
// debt, or a credit, that is never settled is worth less than the owner's will.
const holdsFor = time.Minute

// New makes a Charger and starts its loop.
func New(cfg Config) *Charger {
	ch := idle(cfg)
	go ch.loop()
	return ch
}

// idle makes one whose loop is not running.
func idle(cfg Config) *Charger {
	return &Charger{
		cfg: cfg, payers: make(map[string]*payer), of: make(map[container.ID]*payer),
		turn: feature.Loop{Name: "quotas", Bound: feature.BehindCalls},
		stop: make(chan struct{}), done: make(chan struct{}),
	}
}

// Loop tells whether the loop goes on.
func (ch *Charger) Loop() *feature.Loop { return &ch.turn }

// Add begins to charge a container, with so much of its budget left when its
// packets are dropped. Again it changes nothing but that.
func (ch *Charger) Add(c container.Container, reserve float64) error {
	if !ledger.ValidReserve(reserve) {
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
		if err := ch.drop(c.ID); err != nil { // it was moved to another cgroup
			return fmt.Errorf("netcpu charge: %w", err)
		}
	}
	p := ch.payers[dir]
	if p == nil {
		// What an earlier agent has left, whichever of a pod it was for, is not
		// the owner's will. A weight that isolation needs is there again within a second.
		if err := ch.restore(dir, func(o journal.Owner) bool { return o.Feature == ch.cfg.Feature }); err != nil {
			return fmt.Errorf("netcpu charge: %w", err)
		}
		usage := c.Cgroup.V2
		if dir != c.Cgroup.CPU {
			usage = filepath.Dir(usage) // the pod's
		}
		if p, err = ch.newPayer(dir, usage, c.ID); err != nil {
			return fmt.Errorf("netcpu charge: %w", err)
		}
		ch.payers[dir] = p
	}
	p.members[c.ID] = member{Container: c, reserve: reserve}
	ch.of[c.ID] = p
	return nil
}

// Renamed has the payers go by the names that their cgroups have now.
func (ch *Charger) Renamed(called func(string) string) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	for _, p := range slices.Collect(maps.Values(ch.payers)) {
		delete(ch.payers, p.dir)
		p.dir = called(p.dir)
		p.usage = called(p.usage) // where there is one hierarchy only
		ch.payers[p.dir] = p
	}
}

// Has says whether a container is charged.
func (ch *Charger) Has(id container.ID) bool {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.of[id] != nil
}

// Remove ends it and puts back what the owner of the container had set.
func (ch *Charger) Remove(id container.ID) error {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.drop(id)
}

// drop lets go of a container only when what was turned for it is put back: who
// tries again has to find it here.
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
	} else if p.owner == id { // the next of a pod answers for it
		p.owner = slices.Min(slices.Collect(maps.Keys(p.members)))
	}
	if ch.cfg.Allow == nil {
		return nil
	}
	return ch.cfg.Allow(id, ledger.Unlimited, 0)
}

// Close ends all of it. A second close does nothing.
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

// restore undoes what was turned of a cgroup on behalf of some.
func (ch *Charger) restore(dir string, of func(journal.Owner) bool) error {
	_, err := ch.cfg.Journal.Restore(kernel.Opener(ch.cfg.Roots), func(e journal.Entry) bool {
		return of(e.Owner) && e.Ref.Kind == cgroup.KindFile && filepath.Dir(e.Ref.Object) == dir
	})
	return err
}

// by is who turns the knobs of a container.
func (ch *Charger) by(id container.ID) journal.Owner {
	return journal.Owner{Feature: ch.cfg.Feature, Container: uint64(id)}
}

// loop steps the ledgers, and writes what follows when periods begin.
func (ch *Charger) loop() {
	defer close(ch.done)
	at := time.Now() // of the next round
	due := at        // the next round, look or write
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ch.stop:
			return
		case <-timer.C:
		}
		nap(due)
		now := time.Now()
		if !now.Before(at) {
			if err := ch.round(now); err != nil {
				ch.cfg.Log.Warn("charging containers", "feature", ch.cfg.Feature, "err", err)
			}
			// In step, or the intervals would not be of the same length.
			for at = at.Add(every); !at.After(now); {
				at = at.Add(every)
			}
		}
		next, err := ch.write()
		if err != nil {
			ch.cfg.Log.Warn("changing quotas", "feature", ch.cfg.Feature, "err", err)
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
		timer.Reset(time.Until(next) - grain)
		due = next
	}
}

// grain is what the runtime's timers are good for: they end up in a poll that
// counts milliseconds.
const grain = 1500 * time.Microsecond

// nap sleeps until then, for the last grain, by the kernel's own clock.
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
	ch.turn.Begin()
	defer ch.turn.End()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if len(ch.payers) == 0 {
		return nil
	}
	costs, err := ch.cfg.Read()
	if err != nil {
		if ch.unread.isNews(err, now) {
			return err
		}
		return nil
	}
	var errs []error
	shares := newShares(ch)
	for _, p := range ch.payers {
		err := ch.step(p, costs, shares, now)
		if errors.Is(err, journal.ErrGone) {
			continue // it has ended, and will be removed
		}
		if p.booking.isNews(err, now) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, ch.hold(now))...)
}

// hold makes what is in force hold on.
func (ch *Charger) hold(now time.Time) error {
	if now.Sub(ch.held) < holdsFor/3 {
		return nil
	}
	ch.held = now
	return ch.cfg.Journal.Extend(func(e journal.Entry) bool {
		p := ch.payers[filepath.Dir(e.Ref.Object)]
		return e.Ref.Kind == cgroup.KindFile && p != nil && e.Owner == ch.by(p.owner)
	}, now.Add(holdsFor))
}

// write makes the writes that are due and returns when the next one is, or a
// look at the periods that has to come before; zero for none.
func (ch *Charger) write() (next time.Time, err error) {
	ch.turn.Begin()
	defer ch.turn.End()
	ch.mu.Lock()
	defer ch.mu.Unlock()
	var errs []error
	for _, p := range ch.payers {
		now := time.Now()
		at, err := ch.writeQuota(p, now)
		if !errors.Is(err, journal.ErrGone) && p.writing.isNews(err, now) {
			errs = append(errs, err)
		}
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next, errors.Join(errs...)
}

// Booked is what a ledger holds.
type Booked struct {
	ledger.State
	Factor float64 // the limit in force, in parts of the owner's
}

// Ledgers returns what the ledgers hold, by the container that pays.
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

// Samples appends what the ledgers hold; see Snapshot.
func (ch *Charger) Samples(to []feature.Sample) []feature.Sample {
	for id, b := range ch.Ledgers() {
		to = append(to,
			feature.Sample{Container: id, Name: "netcpu_balance_seconds", Value: b.Balance.Seconds()},
			feature.Sample{Container: id, Name: "netcpu_charged_seconds_total", Value: b.Charged.Seconds()},
			feature.Sample{Container: id, Name: "netcpu_credited_seconds_total", Value: b.Credited.Seconds()},
			feature.Sample{Container: id, Name: "netcpu_forgiven_seconds_total", Value: b.Forgiven.Seconds()},
			feature.Sample{Container: id, Name: "netcpu_limit_writes_total", Value: float64(b.Writes)},
			feature.Sample{Container: id, Name: "netcpu_limit_factor", Value: b.Factor})
	}
	return to
}
