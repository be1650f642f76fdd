package ledger

import (
	"math"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// minFactor is the lowest factor on an owner's weight. A container keeps this part of its weight even if
// its packets alone cost its whole share.
const minFactor = law.Least

// Share is the time that a container may use by its weight alone.
type Share struct {
	// Fair is its part of the CPUs among its siblings by weight, in CPUs. An estimate that is too
	// low does little harm: the container's use beyond it counts as its share.
	Fair float64
	// Contended says that others waited or were robbed. Otherwise weights do not matter.
	Contended bool
	// Quota is its quota, in CPUs; 0: none.
	Quota float64
	// Due is the time that its Ledger wants it to run now, in CPUs.
	Due float64
	// Held says that the quota throttled it, so more weight has no effect.
	Held bool
	// CPUs is the number of CPUs that its tasks may use; 0: unknown.
	CPUs int
}

// Weigher is the account of a container with a weight and no quota, for which the paper has no
// answer. If the container also has a quota, the Weigher makes sure that it can use its Ledger's quota
// while its siblings run. Make it with NewWeigher.
//
// The weight in force is w × (1 − charge / entitlement), both in CPU time. The entitlement is the fair
// share or, if that is more, the container's total use. If all containers compete, totals instead of
// own times become proportional to the weights: own_i ∝ w_i × (1 − charge_i / total_i) means
// total_i ∝ w_i. Each container needs to know only itself. Nothing is summed, so nothing is hoarded.
type Weigher struct {
	last   Counters
	factor float64 // smoothed
	now    float64 // in force
	net    float64 // charge minus credit of the last interval, in CPUs
	own    float64 // own time of the last interval, in CPUs
	state  State
}

// NewWeigher opens an account with the owner's weight in force.
func NewWeigher() *Weigher { return &Weigher{factor: 1, now: 1} }

// Step books the time since the last Step and returns the factor for the owner's weight. It returns
// exactly 1 for no correction.
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
		// The quota already takes its debts. But a higher quota does not pay a credit while others
		// keep the container from using it.
		target = max(1, target)
		if f := w.catchUp(share, d); f > target {
			target, pace = f, law.Tick
		}
	}
	// Smooth the logarithm, so that up and down take the same time.
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

// catchUp returns the factor with which a container that has a credit can run for its due. With quotas
// the law of Weigher gives too little: debtors repay by their quotas and keep their weights, so the sum
// of the weights grows.
func (w *Weigher) catchUp(share Share, d interval) float64 {
	if share.Due <= share.Quota || w.own < near*share.Quota {
		return 0 // no credit, or it runs as much as it wants
	}
	// Waited is an average over its CPUs, so it has waited at most this long on all of them.
	waited := float64(d.waited) / float64(d.length) * float64(share.CPUs)
	content := d.waits && share.CPUs > 0 && w.own+waited < share.Due
	if share.Held || content {
		return w.now // more would have no effect, and less would be too little in the next round
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

// Budget is like [Ledger.Budget], for periods of the given length. A container without a quota may use
// idle time, so its packets are dropped only if they alone cost its fair share while others go short:
// its weight cannot compensate that.
func (w *Weigher) Budget(period time.Duration, share Share, reserve float64) time.Duration {
	if !share.Contended || w.now > 2*minFactor {
		return Unlimited
	}
	cpus := func(n float64) time.Duration { return time.Duration(n * float64(period)) }
	return remaining(cpus(share.Fair), cpus(w.own), reserve)
}
