// Package ledger keeps an account of CPU time for each container (Iron, NSDI 2018, section 3.2). An
// account has the time that the container's tasks ran, plus the time that others spent on its packets,
// minus its own time that went into others' packets, against its owner's limit. The package decides
// which quota or weight balances the account, and how much of a period incoming packets may take.
//
// The package is pure arithmetic with the clock of its caller. It neither reads nor writes kernel
// files: package charge feeds it and carries out its decisions. The paper's algorithms need a patched
// scheduler. [Ledger] and [Weigher] reach the same result on a stock scheduler, and the tests compare
// them with the paper's.
package ledger

import (
	"math"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// minQuota is the kernel's minimum.
const minQuota = time.Millisecond

// These constants follow from package law. settle and near are parts of the quota.
const (
	// settle is the correction below which the owner's value is restored.
	settle = law.Write / law.Most

	// horizon is the least number of periods over which an old debt or credit is spread: a second at
	// the default period. Each write gives away some time, and the remainder must not cause the next
	// write. horizon also bounds a debt, in quotas: any sender can put a container into debt, and
	// without a bound a flood of an hour would stop the container for the next hour.
	horizon = law.Window / (law.Tick / 2)

	near = 1 - 3*law.Least // the quota does not hold a container that uses a smaller part of it
)

// Counters are sums since any moment, which is the same for all of a container's counters.
type Counters struct {
	Taken time.Time

	Ran time.Duration // CPU time of its own tasks, as the kernel charges it

	// Charge is the time of its packets that is not in Ran: in softirqs that interrupt others, in
	// ksoftirqd, and in threads of the host.
	Charge time.Duration

	// Credit is the part of Ran that went into others' packets. No container gets credit for time of
	// an idle CPU. Credit stays zero on a kernel that does not charge interrupted tasks
	// (CONFIG_IRQ_TIME_ACCOUNTING).
	Credit time.Duration

	Throttled uint64 // periods that ended with tasks held by the quota

	// Waited is the time for which its tasks wanted to run and none of them did, as an average over
	// the CPUs that they are on. Zero means unknown.
	Waited time.Duration
}

// State is a Ledger's content, for display.
type State struct {
	// Balance is positive for a credit, negative for a debt.
	Balance time.Duration
	// Charged and Credited are the sums since the Ledger was made.
	Charged, Credited time.Duration
	// Forgiven is debt beyond what can be repaid.
	Forgiven time.Duration
	Writes   uint64
}

// Ledger is the account of a container with a quota. Make it with New. It is not safe for
// concurrent use.
type Ledger struct {
	limit cgroup.Bandwidth
	now   time.Duration // the quota in force
	low   time.Duration // the lowest quota in force since the last step
	last  Counters
	slack time.Duration // unused time, which is not hoarded: see book
	net   float64       // expected credit minus charge of one period, in ns
	own   float64       // time that its own tasks ran in a period, in ns
	lost  float64       // credited part of own, in ns
	state State
}

// New opens an account. limit is in force, without a correction.
func New(limit cgroup.Bandwidth) *Ledger {
	l := &Ledger{limit: limit, now: limit.Quota, low: limit.Quota}
	l.slack = l.allowed()
	return l
}

// SetLimit records a limit that the owner has changed and that is in force. Debts and credits remain.
func (l *Ledger) SetLimit(limit cgroup.Bandwidth) {
	l.limit, l.now, l.low = limit, limit.Quota, limit.Quota
	l.slack = min(l.slack, l.allowed())
	l.bound()
}

// Wrote records the quota in force from now on.
func (l *Ledger) Wrote(quota time.Duration) {
	if quota != l.now {
		l.state.Writes++
	}
	l.now = quota
	l.low = min(l.low, quota)
}

// State returns the content of the ledger.
func (l *Ledger) State() State { return l.state }

// Step books the time since the last Step and returns the quota for the next period. It returns the
// quota in force if a change is not worth a write. Write the quota just after a period has started,
// because a write also refills the pool and wakes throttled tasks. Step books nothing on the first
// call, or if counters have fallen.
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
	a := 1 - math.Pow(1-law.Half, n) // smooth at the same pace for any length of the interval
	l.net += a * (float64(d.credit-d.charge)/n - l.net)
	l.own += a * (float64(d.ran)/n - l.own)
	l.lost += a * (float64(d.credit)/n - l.lost)
	return l.decide(d, n)
}

// book adds n periods to the balance.
//
// Unused time is not hoarded. A positive balance has only time that others' packets or our lower quota
// took from the container while its tasks wanted to run: the quota or other tasks stopped them. The
// slack (see allowed) comes on top and starts full.
func (l *Ledger) book(d interval, n float64) {
	l.state.Charged += d.charge
	l.state.Credited += d.credit
	left := time.Duration(n*float64(l.limit.Quota)) - (d.ran + d.charge - d.credit)
	if left < 0 {
		// Credit pays for overuse first, then slack; the rest is a debt.
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
			l.slack = min(l.slack+balance-max(owed, before), l.allowed())
			balance = owed
		}
	}
	l.state.Balance = balance
	l.bound()
}

// allowed returns how much unused time may pay for later overuse. That is what the kernel itself permits
// in a short time: a quota at the end of one period, another at the start of the next, and the burst.
func (l *Ledger) allowed() time.Duration { return 2*l.limit.Quota + l.limit.Burst }

// bound limits debt and credit to an amount that can be repaid in reasonable time.
func (l *Ledger) bound() {
	limit := horizon * l.limit.Quota
	if over := -limit - l.state.Balance; over > 0 {
		l.state.Forgiven += over
		l.state.Balance += over
	}
	l.state.Balance = min(l.state.Balance, limit)
}

// decide returns the quota: the owner's, plus a part of the balance, plus the expected net of a coming
// period if the quota binds.
func (l *Ledger) decide(d interval, n float64) time.Duration {
	q := float64(l.limit.Quota)
	want := q + l.pay(n)
	if l.binding(d, n) {
		want = grown(want+l.net-l.lost, l.lost, l.own)
	}
	want = min(max(want, float64(l.lowest())), law.Most*q)
	if math.Abs(want-q) < settle*q {
		return l.limit.Quota
	}
	if math.Abs(want-float64(l.now)) < law.Write*q {
		return l.now
	}
	return time.Duration(want).Round(time.Microsecond) // the kernel's unit
}

// grown returns the time that a container has to run to keep left for itself. It lost the part lost of
// ran to others' packets, and loses the same part of the additional time.
func grown(left, lost, ran float64) float64 {
	if lost <= 0 || ran <= 0 {
		return left
	}
	return left / (1 - min(lost/ran, 1-1.0/law.Most))
}

// pay returns the part of the balance that one period settles. It spreads the balance over the horizon
// or twice the time of the last interval, and bounds the part of a large balance.
func (l *Ledger) pay(n float64) float64 {
	q, owed := float64(l.limit.Quota), math.Abs(float64(l.state.Balance))
	if owed < law.Least*q {
		return 0
	}
	part := owed / max(2*n, float64(horizon))
	return math.Copysign(min(part, law.Half*q), float64(l.state.Balance))
}

// binding reports whether the quota limits the container, has limited it, or would limit it if it did
// not wait for CPUs. For a container that stays below its quota, a slightly different quota has no
// effect.
func (l *Ledger) binding(d interval, n float64) bool {
	if d.throttled > 0 || l.state.Balance < 0 {
		return true
	}
	used := max(d.ran, d.ran+d.charge-d.credit) + d.waited
	return float64(used) >= near*n*float64(l.limit.Quota)
}

// lowest returns the lowest quota to write: at least the kernel's minimum and the burst, and enough to
// keep a debtor running.
func (l *Ledger) lowest() time.Duration {
	q := l.limit.Quota
	least := max(minQuota, l.limit.Burst, time.Duration(law.Least*float64(q)).Round(time.Microsecond))
	return min(least, q)
}

// interval is the difference of two Counters.
type interval struct {
	length, ran, charge, credit, waited time.Duration
	throttled                           uint64
	waits                               bool // waited is known
}

// since returns the difference b - a. ok is false if it is of no use.
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
