package ledger

import (
	"math"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// minFactor is the bound of the factor on an owner's weight below: a container with packets that alone
// cost its whole share keeps so much of its weight.
const minFactor = law.Least

// Share is the time that a container may use by its weight alone.
type Share struct {
	// Fair is its part of the CPUs by weight among its siblings, in CPUs. An estimate that is too
	// low does little harm: the container's use beyond it counts as its share.
	Fair float64
	// Contended: others were kept waiting, or robbed, so that the weights matter at all.
	Contended bool
	// Quota is its quota, in CPUs; 0: it has none.
	Quota float64
	// Due is the time that it should run now by its quota's Ledger, in CPUs.
	Due float64
	// Held: the quota stopped it, so more weight has no effect.
	Held bool
	// CPUs is the number of CPUs that its tasks may use; 0: not known.
	CPUs int
}

// Weigher is the account of a container with a weight and no quota, for which the paper has no
// answer. For a container with both, it lets the container use its Ledger's quota while its
// siblings run. Make it with NewWeigher.
//
// Its law is w × (1 − charge / entitlement), both in CPU time. The entitlement is the fair share
// or, if that is more, the container's total use. If all containers compete, this makes the totals,
// not the own times, proportional to the weights: own_i ∝ w_i × (1 − charge_i / total_i) means
// total_i ∝ w_i. Each container needs to know only itself, and nothing is hoarded because nothing
// is summed.
type Weigher struct {
	last   Counters
	factor float64 // smoothed
	now    float64 // in force
	net    float64 // the last interval's charge minus credit, in CPUs
	own    float64 // the last interval's own time, in CPUs
	state  State
}

// NewWeigher opens an account with the owner's weight in force.
func NewWeigher() *Weigher { return &Weigher{factor: 1, now: 1} }

// Step books the time since the last Step and returns the factor to multiply the owner's weight by;
// exactly 1 is the owner's own.
func (w *Weigher) Step(c Counters, share Share) float64 {
	d, ok := since(w.last, c)
	w.last = c
	if !ok {
		return w.now
	}
	w.state.Charged += d.charge
	w.state.Credited += d.credit
	length := float64(d.length)
	w.own, w.net = float64(d.ran)/length, float64(d.charge-d.credit)/length
	target, pace := 1.0, 2*law.Tick
	if entitled := max(share.Fair, w.own+w.net); share.Contended && entitled > 0 {
		target = min(max(1-w.net/entitled, minFactor), law.Most)
	}
	if share.Contended && share.Quota > 0 {
		// Its quota takes its debts. A higher quota does not pay its credit if others keep it from
		// using that.
		target = max(1, target)
		if f := w.catchUp(share, d); f > target {
			target, pace = f, law.Tick
		}
	}
	// In proportion, so that up and down take the same time.
	a := 1 - math.Exp(-length/float64(pace))
	w.factor *= math.Pow(target/w.factor, a)
	switch off := math.Abs(math.Log(w.factor)); {
	case off < settle, w.now == 1 && off < law.Write:
		w.wrote(1)
	case math.Abs(math.Log(w.factor/w.now)) >= law.Write:
		w.wrote(w.factor)
	}
	return w.now
}

// catchUp returns the factor that lets a container with a credit run for its due. The law alone is
// too little with quotas: a debtor repays by its quota and keeps its weight, so the sum of the
// weights grows.
func (w *Weigher) catchUp(share Share, d interval) float64 {
	if share.Due <= share.Quota || w.own < near*share.Quota {
		return 0 // it has no credit, or has what it wants
	}
	// An average over its CPUs: on all of them it waits for at most as long.
	waited := float64(d.waited) / float64(d.length) * float64(share.CPUs)
	content := d.waits && share.CPUs > 0 && w.own+waited < share.Due
	if share.Held || content {
		return w.now // more would have no effect, and less would be missing in the next round
	}
	return min(w.now*share.Due/w.own, law.Most)
}

func (w *Weigher) wrote(factor float64) {
	if factor != w.now {
		w.state.Writes++
	}
	w.now = factor
}

// State returns the content of the account. It has no balance.
func (w *Weigher) State() State { return w.state }

// Budget is like [Ledger.Budget], for each period of the given length. A container without a quota
// may use idle time, so its packets are dropped only if they alone cost its fair share while others
// go short, which its weight cannot compensate.
func (w *Weigher) Budget(period time.Duration, share Share, reserve float64) time.Duration {
	if !share.Contended || w.now > 2*minFactor {
		return Unlimited
	}
	cpus := func(n float64) time.Duration { return time.Duration(n * float64(period)) }
	return remaining(cpus(share.Fair), cpus(w.own), reserve)
}
