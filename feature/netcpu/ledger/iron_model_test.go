package ledger

import "time"

// Global is the state that Iron's scheduler keeps of one container over all CPUs, with the paper's
// names (NSDI 2018, section 3.2). No stock kernel runs this; it is the reference for [Ledger].
type Global struct {
	Runtime time.Duration // left of the period; negative is a debt
	Gained  time.Duration // due to it for others' softirqs, never negative
	Refill  time.Duration // the quota
	Slice   time.Duration // the time that a CPU takes from Runtime at once
}

// Local is the state on one CPU.
type Local struct {
	RTRemain time.Duration // rt_remain: the time that the CPU may still give to its tasks

	// CPUUsage is cpuusage: positive is network time that the container has not
	// been charged for yet, negative is a credit for work on others' behalf.
	CPUUsage time.Duration
}

// Period is the paper's algorithm 1, at the end of each period. idled: the container did not want
// some of its allocation.
func (g *Global) Period(idled bool) {
	g.Runtime += g.Gained // line 2
	g.Gained = 0
	if idled && g.Runtime > 0 { // lines 5 to 7
		g.Runtime = 0
	}
	g.Runtime += g.Refill // line 8
}

// Refilled is the paper's algorithm 2, on a CPU that has used up its RTRemain. It reports whether
// tasks may go on; if not, the CPU is throttled until the period ends.
//
// Lines 14 to 18 require a runtime of zero: a credit that arrives while the runtime is negative
// waits for the end of the period, where it reduces the debt; spent at once it would let a
// container in debt run.
func (g *Global) Refilled(l *Local) bool {
	var amount time.Duration
	minAmount := g.Slice - l.RTRemain
	if l.CPUUsage > 0 { // lines 3 to 9
		if l.CPUUsage > g.Gained {
			g.Runtime -= l.CPUUsage - g.Gained
			g.Gained = 0
		} else {
			g.Gained -= l.CPUUsage
		}
	} else { // lines 10 to 12
		g.Gained -= l.CPUUsage
	}
	l.CPUUsage = 0
	if g.Runtime == 0 && g.Gained > 0 { // lines 14 to 18
		refill := min(minAmount, g.Gained)
		g.Runtime = refill
		g.Gained -= refill
	}
	if g.Runtime > 0 { // lines 19 to 22
		amount = min(g.Runtime, minAmount)
		g.Runtime -= amount
	}
	l.RTRemain += amount // line 23
	return l.RTRemain > 0
}

// keep is the time that a CPU with nothing to run does not give back (kernel/sched/fair.c,
// min_cfs_rq_runtime).
const keep = time.Millisecond

// Return gives back a CPU's remaining time as its last task goes to sleep. The paper leaves that to
// the unchanged kernel: a debt stays with the CPU.
func (g *Global) Return(l *Local) {
	if slack := l.RTRemain - keep; slack > 0 {
		g.Runtime += slack
		l.RTRemain -= slack
	}
}
