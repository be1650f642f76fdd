// Package ledger keeps one account of CPU time for each container: the time that its own tasks ran,
// plus the network time that others spent for it, minus its own time that went into others'
// packets, against its owner's limit. It decides which quota, or which weight, balances the
// account, and how much of a period the container's incoming packets may take (Iron, NSDI 2018,
// section 3.2).
//
// It is pure arithmetic with the clock of its caller: it reads no kernel file and writes none.
// Package charge feeds it and carries out its decisions. The paper's own algorithms need a patched
// scheduler; [Ledger] and [Weigher] reach the same result on a stock one, and the tests compare
// them with the paper's.
package ledger

import (
	"math"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// minQuota is the kernel's.
const minQuota = time.Millisecond

// What follows from the law, in parts of the quota.
const (
	// settle is a correction below which, after a larger one, the owner's value is restored.
	settle = law.Write / law.Most

	// horizon is the least number of periods over which an old debt or credit is spread: a second
	// at the usual period. Each write gives away some time, and the remainder after it must not ask
	// for the next write. It also limits a debt, in quotas: any sender can put a container into debt,
	// and without a bound a flood of an hour would stop it for the next hour.
	horizon = law.Window / (law.Tick / 2)

	near = 1 - 3*law.Least // a container that uses a smaller part is not held by its quota
)

// Counters are sums since any moment, the same for all counters of a container.
type Counters struct {
	Taken time.Time

	Ran time.Duration // CPU time of its own tasks, as the kernel charges it

	// Charge is network time on its behalf that is not in Ran: in interrupts
	// that hit others, in ksoftirqd, in threads of the host.
	Charge time.Duration

	// Credit is the part of Ran that went into others' packets. Time taken from an idle CPU is no
	// container's credit. Credit stays zero on a kernel that does not charge interrupted tasks
	// (CONFIG_IRQ_TIME_ACCOUNTING).
	Credit time.Duration

	Throttled uint64 // periods that ended with tasks held by the quota

	// Waited is the time for which its tasks wanted to run and did not, for any reason but one
	// another: an average over the CPUs that they are on. Zero means unknown.
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
	net   float64       // the expected credit minus charge of one period, in ns
	own   float64       // time that its own tasks ran in a period, in ns
	lost  float64       // the credited part of own, in ns
	state State
}

// New opens an account, with the quota in force and no correction.
func New(limit cgroup.Bandwidth) *Ledger {
	l := &Ledger{limit: limit, now: limit.Quota, low: limit.Quota}
	l.slack = l.allowed()
	return l
}

// SetLimit records that the owner has changed the limit, which is in force now. Debts and credits
// remain.
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
// quota in force if a change is not worth a write. Call it right after a period has started, and
// write the quota then, since a write also refills the pool and wakes held tasks. The first Step,
// and one with counters that went back, book nothing.
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
	a := 1 - math.Pow(1-law.Half, n) // the same pace for an interval of any length
	l.net += a * (float64(d.credit-d.charge)/n - l.net)
	l.own += a * (float64(d.ran)/n - l.own)
	l.lost += a * (float64(d.credit)/n - l.lost)
	return l.decide(d, n)
}

// book adds n periods to the balance.
//
// Unused time is not hoarded: a positive balance contains only time that was taken from the
// container, stolen or held back by us, and only as far as its tasks wanted to run meanwhile: the
// quota stopped them, or others did. The slack on top (see allowed) starts full.
func (l *Ledger) book(d interval, n float64) {
	l.state.Charged += d.charge
	l.state.Credited += d.credit
	left := time.Duration(n*float64(l.limit.Quota)) - (d.ran + d.charge - d.credit)
	if left < 0 {
		// Overuse is paid from the credit first, then from the slack; the rest is a debt.
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

// allowed returns how much unused time may make up for a later overdraft: as much as the kernel
// itself permits in a short time, which is a quota at the end of one period, another at the start
// of the next, and the burst.
func (l *Ledger) allowed() time.Duration { return 2*l.limit.Quota + l.limit.Burst }

// bound limits debt and credit to what can be repaid in reasonable time.
func (l *Ledger) bound() {
	limit := horizon * l.limit.Quota
	if over := -limit - l.state.Balance; over > 0 {
		l.state.Forgiven += over
		l.state.Balance += over
	}
	l.state.Balance = min(l.state.Balance, limit)
}

// decide returns the quota: the owner's, plus the expected net of the coming periods, plus a part
// of the balance.
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

// grown returns the time that a container has to run to keep left for itself, if it lost lost of
// ran to others' packets: it loses the same part of what it is given for that.
func grown(left, lost, ran float64) float64 {
	if lost <= 0 || ran <= 0 {
		return left
	}
	return left / (1 - min(lost/ran, 1-1.0/law.Most))
}

// pay returns the part of the balance that one period settles: it is spread over the horizon, or
// over twice the time in which it grew, and a large balance is settled at a bounded pace.
func (l *Ledger) pay(n float64) float64 {
	q, owed := float64(l.limit.Quota), math.Abs(float64(l.state.Balance))
	if owed < law.Least*q {
		return 0
	}
	part := owed / max(2*n, float64(horizon))
	return math.Copysign(min(part, law.Half*q), float64(l.state.Balance))
}

// binding reports whether the quota limits the container, did so, or would if the container got its
// turn in time. A container that stays below its quota can neither be charged by a lower one nor
// helped by a higher one.
func (l *Ledger) binding(d interval, n float64) bool {
	if d.throttled > 0 || l.state.Balance < 0 {
		return true
	}
	used := max(d.ran, d.ran+d.charge-d.credit) + d.waited
	return float64(used) >= near*n*float64(l.limit.Quota)
}

// lowest returns the least quota that may be written: at least the kernel's minimum and the burst,
// and enough for a debtor to go on.
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
