package charge

import (
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// payer is a cgroup with an account: the cgroup of a container, or of a pod, whose containers share
// the account.
type payer struct {
	dir     string // directory in the hierarchy of the cpu controller
	usage   string // directory with its CPU time
	owner   container.ID
	members map[container.ID]member

	limit cgroup.Bandwidth // set by its owner
	now   time.Duration    // quota in force
	want  time.Duration    // quota that should be in force
	pace  pace
	due   time.Time // start of a period at which to write
	again time.Time // earliest retry after a failed write

	ledger  *ledger.Ledger // nil without a quota
	held    uint64         // throttled periods, at the last step
	weigher *ledger.Weigher
	weight  uint64 // set by its owner; 0: the cgroup is idle and has no weight
	weighs  uint64 // weight in force
	sum     cost   // of the members while they were members
	took    rate
}

// member is one container of a payer.
type member struct {
	container.Container
	reserve float64 // T; see ledger.Budget
	last    *cost   // cost at the last step; nil before the first
}

// reserve returns the largest reserve of the members. Their packets share one budget, so the strictest
// member decides.
func (p *payer) reserve() (t float64) {
	for _, m := range p.members {
		t = max(t, m.reserve)
	}
	return t
}

// newPayer opens the account of a cgroup, with its owner's quota and weight.
func (ch *Charger) newPayer(dir, usage string, owner container.ID) (*payer, error) {
	p := &payer{dir: dir, usage: usage, owner: owner, members: make(map[container.ID]member)}
	if usage == "" {
		return nil, errors.New("the container's cgroup is not known")
	}
	b, _, err := cgroup.GivenBandwidth(ch.cfg.Journal, dir, ch.v2())
	if err != nil {
		return nil, err
	}
	return p, ch.limited(p, b)
}

// limited starts or updates an account with the owner's present limit.
func (ch *Charger) limited(p *payer, b cgroup.Bandwidth) error {
	p.limit, p.now, p.want = b, b.Quota, b.Quota
	p.due, p.again = time.Time{}, time.Time{}
	if p.pace.period != b.Period {
		p.pace = pace{period: b.Period}
	}
	switch {
	case b.Limited && p.ledger != nil:
		p.ledger.SetLimit(b)
		return nil
	case b.Limited:
		p.ledger = ledger.New(b)
	default:
		p.ledger = nil
	}
	p.weigher = ledger.NewWeigher()
	if p.weighs != 0 {
		return ch.turnWeight(p, p.weight)
	}
	w, _, err := cgroup.GivenWeight(ch.cfg.Journal, p.dir, ch.v2())
	p.weight, p.weighs = w, w
	return err
}

// step books the time since the last round for one payer.
func (ch *Charger) step(p *payer, costs map[container.ID]cost, shares *shares, now time.Time) error {
	b, claimed, err := cgroup.GivenBandwidth(ch.cfg.Journal, p.dir, ch.v2())
	if err != nil {
		return err
	}
	if err := ch.follow(p, b, claimed); err != nil {
		return err
	}
	c, err := p.counters(costs, now)
	if err != nil {
		return err
	}
	// Without the wait time the ledger only gives less. An early return would leave the last quota in
	// force.
	unread := p.waited(&c)
	// Weights only matter if packets keep tasks from running. They are read only then, because a parent
	// may have hundreds of children.
	var share ledger.Share
	if p.took.next(now, p.sum.Took+c.Credit) > law.Loss {
		if share, err = shares.of(p); err != nil {
			return err
		}
	}
	share.Held = c.Throttled != p.held
	p.held = c.Throttled
	if p.ledger != nil {
		p.want = p.ledger.Step(c)
		share.Due = float64(p.want) / float64(p.limit.Period)
	}
	weighed := ch.weigh(p, p.weigher.Step(c, share))
	budget := ledger.Unlimited
	if p.ledger != nil {
		budget = p.ledger.Budget(p.reserve())
	} else {
		budget = p.weigher.Budget(p.limit.Period, share, p.reserve())
	}
	errs := []error{weighed, unread}
	if ch.cfg.Allow != nil {
		if p.limit.Period <= 0 {
			budget = ledger.Unlimited
		} else if budget != ledger.Unlimited { // for a round, which may contain several periods
			budget = time.Duration(float64(budget) * float64(law.Tick) / float64(p.limit.Period))
		}
		for id := range p.members {
			// A late round finds the limit still in force; a missing round ends it.
			errs = append(errs, ch.cfg.Allow(id, budget, 2*law.Tick))
		}
	}
	return errors.Join(errs...)
}

// follow adopts a limit that the owner has changed. It never writes an older value again. Without a
// claim in the journal, no quota of ours is in force.
func (ch *Charger) follow(p *payer, b cgroup.Bandwidth, claimed bool) error {
	switch {
	case b.Limited != p.limit.Limited, b.Limited && (b.Quota != p.limit.Quota || !claimed && p.now != p.limit.Quota):
		return ch.limited(p, b)
	case b.Period == p.limit.Period && b.Burst == p.limit.Burst:
		return nil
	case !b.Limited:
		p.limit = b
		return nil
	}
	// The quota did not change, but the period or the burst did.
	ours := p.now
	if err := ch.limited(p, b); err != nil {
		return err
	}
	p.now, p.want = ours, ours
	p.ledger.Wrote(ours)
	return nil
}

// counters returns the sums of a payer. It ignores the cost of a member's packets before it joined, and
// keeps their cost after it has left.
func (p *payer) counters(costs map[container.ID]cost, now time.Time) (c ledger.Counters, err error) {
	for id, m := range p.members {
		x := costs[id]
		if m.last != nil {
			p.sum = p.sum.plus(x.since(*m.last))
		}
		m.last = &x
		p.members[id] = m
	}
	c = ledger.Counters{Taken: now, Charge: p.sum.Charge, Credit: p.sum.Credit}
	if c.Ran, err = cgroup.Usage(p.usage); err != nil || p.ledger == nil {
		return c, err
	}
	periods, err := cgroup.ReadPeriods(p.dir)
	c.Throttled = periods.Throttled
	return c, err
}

// waited adds the wait time of the tasks if there is a quota. The time stays unknown on an error. If the
// kernel does not count waits, that is no error.
func (p *payer) waited(c *ledger.Counters) (err error) {
	if p.ledger == nil {
		return nil
	}
	if c.Waited, err = cgroup.Waited(p.usage); errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	return err
}

// writeQuota writes the wanted quota if a period has just started. It returns the time of the next call,
// or zero if there is nothing to write.
func (ch *Charger) writeQuota(p *payer, now time.Time) (time.Time, error) {
	if p.ledger == nil || p.want == p.now || now.Before(p.again) {
		p.pace, p.due = pace{period: p.pace.period, start: p.pace.start}, time.Time{} // end a search
		return time.Time{}, nil
	}
	switch {
	case p.pace.start.IsZero():
		periods, err := cgroup.ReadPeriods(p.dir)
		if err != nil {
			p.want = p.now
			return time.Time{}, err
		}
		if now := time.Now(); !p.pace.saw(now, periods.Count) {
			return now.Add(lookEvery), nil
		}
	case p.due.IsZero():
		p.due = p.pace.next(now)
		return p.due, nil
	case now.Before(p.due):
		return p.due, nil
	}
	p.due = time.Time{}
	return time.Time{}, ch.turnQuota(p, p.want)
}

func (ch *Charger) v2() bool { return ch.cfg.Layout.CPU == ch.cfg.Layout.V2 }

// turnQuota claims a quota, unless the owner has set another limit meanwhile. Another feature's claim
// may override it; the ledger does not owe that difference.
func (ch *Charger) turnQuota(p *payer, quota time.Duration) error {
	k, value := cgroup.Quota(p.dir, ch.v2(), quota, p.limit.Period)
	_, given := cgroup.Quota(p.dir, ch.v2(), p.limit.Quota, p.limit.Period)
	err := ch.cfg.Journal.TurnGiven(k, given, value, ch.by(p.owner), time.Now().Add(law.Long))
	if errors.Is(err, journal.ErrChanged) {
		p.want = p.now // the next round finds the new state
		return nil
	}
	if err != nil {
		// For example EINVAL if a child has a larger quota (v1), which can last. The ledger
		// continues with the quota in force.
		p.want = p.now
		p.again = time.Now().Add(law.Calm)
		return err
	}
	p.now = quota
	p.ledger.Wrote(quota)
	return nil
}

// weigh multiplies the owner's weight, which may have changed, by factor. If isolation has set the
// weight for another container of the pod, weigh leaves that weight alone and treats it as the
// owner's.
func (ch *Charger) weigh(p *payer, factor float64) error {
	given, claimed, err := cgroup.GivenWeight(ch.cfg.Journal, p.dir, ch.v2())
	if err != nil {
		return err
	}
	knob, takes := cgroup.WeightKnob(p.dir, ch.v2())
	if e, turned := ch.cfg.Journal.Entry(knob.Ref(), ch.cfg.Feature); turned {
		if _, mine := p.members[container.ID(e.Owner.Container)]; !mine {
			p.weight, err = strconv.ParseUint(e.Value, 10, 63)
			p.weighs = p.weight
			return err
		}
	}
	if given != p.weight || !claimed && p.weighs != p.weight {
		p.weight, p.weighs = given, given
	}
	if p.weight == 0 {
		return nil // the kernel rejects any other weight (EINVAL)
	}
	return ch.turnWeight(p, scaled(p.weight, factor, takes.Least, takes.Most))
}

// scaled applies a factor to an owner's weight within the kernel's bounds.
func scaled(weight uint64, factor float64, least, most uint64) uint64 {
	if factor == 1 {
		return weight
	}
	return uint64(math.Round(min(max(float64(weight)*factor, float64(least)), float64(most))))
}

func (ch *Charger) turnWeight(p *payer, weight uint64) error {
	if weight == p.weighs {
		return nil
	}
	knob, _ := cgroup.WeightKnob(p.dir, ch.v2())
	err := ch.cfg.Journal.TurnGiven(knob, strconv.FormatUint(p.weight, 10), strconv.FormatUint(weight, 10), ch.by(p.owner), time.Now().Add(law.Long))
	if errors.Is(err, journal.ErrChanged) {
		return nil
	}
	if err == nil {
		p.weighs = weight
	}
	return err
}

// restored records that the owner's settings are in force again.
func (p *payer) restored() {
	p.now, p.want, p.weighs = p.limit.Quota, p.limit.Quota, p.weight
	if p.ledger != nil {
		p.ledger.Wrote(p.now)
	}
}

// state returns the content of the ledger, and the limit in force as a part of the owner's limit.
func (p *payer) state() (ledger.State, float64) {
	if p.ledger != nil {
		return p.ledger.State(), float64(p.now) / float64(p.limit.Quota)
	}
	if p.weight == 0 {
		return p.weigher.State(), 1
	}
	return p.weigher.State(), float64(p.weighs) / float64(p.weight)
}

// rate is the growth rate of a sum.
type rate struct {
	at  time.Time
	sum time.Duration
}

// next returns the growth rate since the last call, in CPUs.
func (r *rate) next(now time.Time, sum time.Duration) float64 {
	last := *r
	*r = rate{now, sum}
	length := now.Sub(last.at)
	if last.at.IsZero() || length <= 0 || sum < last.sum {
		return 0
	}
	return float64(sum-last.sum) / float64(length)
}
