// Package ledger keeps one account of CPU time for each container: what its own
// tasks ran, plus the network time that others spent for it, minus the time of
// its own that went into others' packets, against what its owner gave it. It
// decides which quota, or which weight, brings the two together, and how much of
// a period its incoming packets may take (Iron, NSDI 2018, section 3.2).
//
// It is pure arithmetic with the clock of its caller: it reads no kernel file and
// writes none. Package charge feeds it and carries out what it decides. The paper's
// own algorithms need a patched scheduler; [Ledger] and [Weigher] are what comes to
// the same on a stock one, and the tests hold them against those.
package ledger

import (
	"math"
	"time"
)

// What a stock kernel forces, and what keeps the law stable. All are parts of
// the quota unless said otherwise.
const (
	MinQuota = time.Millisecond // the kernel takes nothing less

	leave  = 0.02  // a correction below this is not worth a write, which refills the pool
	settle = 0.005 // one below this, while another is in force, gives the owner's value back

	floor  = 0.05 // what a debtor keeps, so that it can go on, slowly
	ceil   = 4    // what the robbed may get at most
	payOff = 0.5  // of each period at most goes into an old debt or credit

	// horizon is how many periods at least an old debt or credit is spread over.
	// A second at the usual period: what is left of it after a write, as each
	// write gives away some time, must not ask for the next one.
	horizon = 10

	// rest is the part of a quota that is never asked for: the kernel accounts
	// in ticks, so that a balance never comes to nothing.
	rest = 0.05

	// MaxDebt is how many quotas a debt may grow to. A container can be made to
	// owe by whoever sends to it: without a bound a flood of an hour would stop
	// it for the next.
	MaxDebt = 10

	near = 0.9 // a container that uses less than this is not held by its quota

	// gain is the weight of the last interval in the expected net charge.
	gain = 0.5
)

// Limit is what the owner of a container gave it.
type Limit struct {
	Quota  time.Duration // of CPU time in each Period
	Period time.Duration
	Burst  time.Duration // unused quota that the kernel carries over
}

// Counters are sums since any moment, the same for all of one container's.
type Counters struct {
	Taken time.Time

	Ran time.Duration // CPU time of its own tasks, as the kernel charges it

	// Charge is network time on its behalf that is not in Ran: in interrupts
	// that hit others, in ksoftirqd, in threads of the host.
	Charge time.Duration

	// Credit is the part of Ran that went into others' packets. Time taken
	// from an idle CPU is nobody's credit. It stays zero where the kernel does
	// not charge interrupted tasks (CONFIG_IRQ_TIME_ACCOUNTING).
	Credit time.Duration

	Throttled uint64 // periods that ended with tasks held back by the quota

	// Waited is how long its tasks would have run and did not, whatever held
	// them but one another: on average over the CPUs that they are on. Zero is
	// not known.
	Waited time.Duration
}

// State is a Ledger's content, to be shown.
type State struct {
	// Balance is what the container is owed; negative, what it owes.
	Balance time.Duration
	// Net is the expected credit less charge of one period.
	Net time.Duration
	// Charged and Credited are the sums since the Ledger was made.
	Charged, Credited time.Duration
	// Forgiven is debt beyond MaxDebt, and Lapsed is credit that was not used.
	Forgiven, Lapsed time.Duration
	Writes           uint64
}

// Ledger is the account of a container that has a quota. Make it with New. It
// is not safe for concurrent use.
type Ledger struct {
	limit Limit
	now   time.Duration // the quota in force
	low   time.Duration // the lowest in force since the last step
	last  Counters
	slack time.Duration // unused, and not to be hoarded: see book
	net   float64       // as State.Net, in ns
	own   float64       // what its own tasks ran in a period, in ns
	lost  float64       // the part of that which was credited, in ns
	state State
}

// New opens an account. The limit is in force, with no correction.
func New(limit Limit) *Ledger {
	l := &Ledger{limit: limit, now: limit.Quota, low: limit.Quota}
	l.slack = l.allowed()
	return l
}

// Limit returns what the owner gave.
func (l *Ledger) Limit() Limit { return l.limit }

// SetLimit notes that the owner has changed the limit, which is in force now.
// What is owed either way is owed still.
func (l *Ledger) SetLimit(limit Limit) {
	l.limit, l.now, l.low = limit, limit.Quota, limit.Quota
	l.slack = min(l.slack, l.allowed())
	l.bound()
}

// Wrote notes the quota that is in force from now on.
func (l *Ledger) Wrote(quota time.Duration) {
	if quota != l.now {
		l.state.Writes++
	}
	l.now = quota
	l.low = min(l.low, quota)
}

// State returns the content of the ledger.
func (l *Ledger) State() State {
	s := l.state
	s.Net = time.Duration(l.net)
	return s
}

// Step books what happened since the last one and returns the quota that should
// be in force from the next period on, the one that is if a change is not worth
// a write. It should be called right after a period has begun, and the quota
// written then, since a write also refills the pool and wakes whom it held. The
// first Step, and one whose counters went back, book nothing.
func (l *Ledger) Step(c Counters) time.Duration {
	d, ok := since(l.last, c)
	l.last = c
	if !ok {
		l.low = l.now
		return l.now
	}
	n := float64(d.length) / float64(l.limit.Period)
	l.book(d, n)
	l.low = l.now
	a := 1 - math.Pow(1-gain, n) // so that the pace is the same at any length
	l.net += a * (float64(d.credit-d.charge)/n - l.net)
	l.own += a * (float64(d.ran)/n - l.own)
	l.lost += a * (float64(d.credit)/n - l.lost)
	return l.decide(d, n)
}

// book adds n periods to the balance.
//
// What is unused is not hoarded: a positive balance holds only what was taken
// from the container, stolen or held back by us, and only in so far as it would
// have run meanwhile: the quota stopped it, or others did. The slack on top (see
// allowed) starts full.
func (l *Ledger) book(d interval, n float64) {
	l.state.Charged += d.charge
	l.state.Credited += d.credit
	left := l.quotas(n) - (d.ran + d.charge - d.credit)
	if left < 0 {
		// What it was owed is being paid; then comes the slack, then a debt.
		use := min(l.slack, max(0, -left-max(0, l.state.Balance)))
		l.slack -= use
		l.state.Balance += left + use
		l.bound()
		return
	}
	before := l.state.Balance
	balance := before + left
	if balance > 0 {
		held := min(1, float64(d.throttled)/n)
		withheld := n * float64(max(0, l.limit.Quota-l.low))
		taken := max(0, before) + d.credit
		owed := max(time.Duration(held*float64(taken)), min(taken, d.waited)) + time.Duration(held*withheld)
		if balance > owed {
			l.state.Lapsed += max(0, before-owed)
			l.slack = min(l.slack+balance-max(owed, before), l.allowed())
			balance = owed
		}
	}
	l.state.Balance = balance
	l.bound()
}

// allowed is how much unused time may make up for an overdraft later: what the
// kernel itself lets pass in a short time, a quota at the end of one period and
// one at the begin of the next, and the burst.
func (l *Ledger) allowed() time.Duration { return 2*l.limit.Quota + l.limit.Burst }

// Timely says whether so long after the begin of a period is early enough for a
// write. What the container has run since comes on top of its quota.
func (l *Ledger) Timely(late time.Duration) bool { return late <= l.limit.Quota/8 }

// bound keeps debt and credit within what can be repaid in reasonable time.
func (l *Ledger) bound() {
	limit := MaxDebt * l.limit.Quota
	if over := -limit - l.state.Balance; over > 0 {
		l.state.Forgiven += over
		l.state.Balance += over
	}
	if over := l.state.Balance - limit; over > 0 {
		l.state.Lapsed += over
		l.state.Balance -= over
	}
}

func (l *Ledger) quotas(n float64) time.Duration {
	return time.Duration(n * float64(l.limit.Quota))
}

// decide chooses the quota: the owner's, plus what the coming periods are
// expected to bring, plus a part of what is owed.
func (l *Ledger) decide(d interval, n float64) time.Duration {
	q := float64(l.limit.Quota)
	want := q + l.pay(n)
	if l.binding(d, n) {
		want = grown(want+l.net-l.lost, l.lost, l.own)
	}
	want = min(max(want, float64(l.lowest())), ceil*q)
	off := math.Abs(want - q)
	if off < settle*q || off < leave*q && !l.correcting(time.Duration(want-q)) {
		return l.limit.Quota
	}
	if math.Abs(want-float64(l.now)) < leave*q {
		return l.now
	}
	return time.Duration(want).Round(time.Microsecond) // the kernel's unit
}

// grown is what a container has to run to have so much left for itself, where of
// what it ran some was lost to others' packets: of what it is given for that as
// large a part is lost again.
func grown(left, lost, ran float64) float64 {
	if lost <= 0 || ran <= 0 {
		return left
	}
	return left / (1 - min(lost/ran, 1-1.0/ceil))
}

// correcting says whether the quota in force is on that side of the owner's. To
// go over to the other side takes as much as to begin: what is left of a debt
// would otherwise swing from one to the other with each write.
func (l *Ledger) correcting(side time.Duration) bool {
	return side < 0 && l.now < l.limit.Quota || side > 0 && l.now > l.limit.Quota
}

// pay is the part of the balance that one period settles: it goes over the
// horizon, or over twice the time that it took to come, and a large one at a
// bounded pace.
func (l *Ledger) pay(n float64) float64 {
	q, owed := float64(l.limit.Quota), math.Abs(float64(l.state.Balance))
	part := owed / max(2*n, horizon)
	switch {
	case owed < rest*q:
		return 0
	case l.correcting(l.state.Balance): // once at it, to the end
		part = max(part, min(leave*q, owed/max(n, 1)))
	}
	return math.Copysign(min(part, payOff*q), float64(l.state.Balance))
}

// binding says whether the quota is, or was, what limits the container, or would
// if it had its turn in time. One that stays below it can neither be charged by a
// lower nor helped by a higher one.
func (l *Ledger) binding(d interval, n float64) bool {
	if d.throttled > 0 || l.state.Balance < 0 {
		return true
	}
	used := max(d.ran, d.ran+d.charge-d.credit) + d.waited
	return float64(used) >= near*n*float64(l.limit.Quota)
}

// lowest is the least that may be written: the kernel's minimum, no less than
// the burst, and something for a debtor to go on with.
func (l *Ledger) lowest() time.Duration {
	q := l.limit.Quota
	least := max(MinQuota, l.limit.Burst, time.Duration(floor*float64(q)).Round(time.Microsecond))
	return min(least, q)
}

// interval is the difference of two Counters.
type interval struct {
	length, ran, charge, credit, waited time.Duration
	throttled                           uint64
	waits                               bool // waited is known
}

// since subtracts; ok is false without a useful difference.
func since(a, b Counters) (d interval, ok bool) {
	d = interval{
		length: b.Taken.Sub(a.Taken),
		ran:    b.Ran - a.Ran, charge: b.Charge - a.Charge, credit: b.Credit - a.Credit,
		throttled: b.Throttled - a.Throttled,
	}
	if d.waits = a.Waited > 0 && b.Waited >= a.Waited; d.waits {
		d.waited = b.Waited - a.Waited
	}
	ok = !a.Taken.IsZero() && d.length > 0 && d.ran >= 0 && d.charge >= 0 && d.credit >= 0 && b.Throttled >= a.Throttled
	return d, ok
}
