package ledger

import (
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

const ms = time.Millisecond

// tick is the step of the simulated CPU, and its time slice.
const tick = ms / 2

// task is a container on the simulated CPU: its demand and its counters.
type task struct {
	period, quota time.Duration // quota in force; 0: none
	phase         time.Duration // of its periods
	weight        float64
	wants         func(now time.Duration) bool    // whether its tasks want to run
	net           func(now time.Duration) float64 // CPUs that its packets take in softirq
	budget        time.Duration                   // of net in a period; Unlimited: no drop

	pool      time.Duration // quota left in this period
	throttled bool
	vruntime  float64
	inPeriod  time.Duration // network time in this period

	c    Counters
	work time.Duration // the time that it really had: without softirqs
}

// total returns the container's cost, by the paper's arithmetic.
func (k *task) total() time.Duration { return k.c.Ran + k.c.Charge - k.c.Credit }

// write is the kernel's behaviour on a write of the quota (section 4b), at any moment: it refills
// the pool and unthrottles all tasks.
func (k *task) write(quota time.Duration) {
	k.quota, k.pool, k.throttled = quota, quota, false
}

// cpu is one CPU of a kernel without IRQ time accounting: softirqs run in the context of the
// running task, and are charged to it.
type cpu struct {
	now   time.Duration
	tasks []*task
	used  time.Duration
}

// epoch is the start of the simulation.
var epoch = time.Unix(1_000_000, 0)

func (c *cpu) step() {
	for _, k := range c.tasks {
		if (c.now-k.phase)%k.period != 0 {
			continue
		}
		if k.throttled {
			k.c.Throttled++
		}
		k.pool = k.quota + min(k.pool, 0) // an overrun stays
		k.throttled, k.inPeriod = false, 0
	}
	runs := c.pick()
	// Softirqs come first. They take no more than nine tenths, as ksoftirqd lets tasks run.
	left := tick * 9 / 10
	soft := time.Duration(0)
	for _, k := range c.tasks {
		s := min(time.Duration(k.net(c.now)*float64(tick)), left)
		if k.budget != Unlimited && k.inPeriod+s > k.budget {
			s = 0
		}
		left -= s
		soft += s
		k.inPeriod += s
		if k == runs {
			continue // it pays itself
		}
		k.c.Charge += s
		if runs != nil {
			runs.c.Credit += s
		}
	}
	c.used += soft
	if runs != nil {
		c.used += tick - soft
		runs.c.Ran += tick
		runs.work += tick - soft
		runs.vruntime += float64(tick) / runs.weight
		if runs.quota > 0 {
			runs.pool -= tick
			runs.throttled = runs.pool <= 0
		}
	}
	c.now += tick
	for _, k := range c.tasks {
		k.c.Taken = epoch.Add(c.now)
	}
}

// pick chooses by weight. A task that wakes does not make up for its sleep.
func (c *cpu) pick() *task {
	var best *task
	for _, k := range c.tasks {
		if k.quota > 0 && k.throttled || !k.wants(c.now) {
			continue
		}
		if best == nil || k.vruntime < best.vruntime {
			best = k
		}
	}
	if best == nil {
		return nil
	}
	for _, k := range c.tasks {
		k.vruntime = max(k.vruntime, best.vruntime-float64(10*tick)/k.weight)
	}
	return best
}

// newTask returns a container that computes without end and gets no packets.
func newTask(quota time.Duration) *task {
	return &task{
		period: 100 * ms, quota: quota, weight: 1, budget: Unlimited,
		wants: func(time.Duration) bool { return true }, net: constant(0),
	}
}

func constant(cpus float64) func(time.Duration) float64 {
	return func(time.Duration) float64 { return cpus }
}

// between returns a rate that applies for part of the time.
func between(from, to time.Duration, cpus float64) func(time.Duration) float64 {
	return func(now time.Duration) float64 {
		if now < from || now >= to {
			return 0
		}
		return cpus
	}
}

// host runs ledgers over a CPU: each is stepped every few periods, some time after the period has
// started, like a process that has to wait its turn.
type host struct {
	cpu
	ledgers []*Ledger
	every   int           // periods
	late    time.Duration // after the start of a period
	reserve float64       // T, and drop; 0: no drop
	lowest  []time.Duration
}

func newHost(every int, late time.Duration, tasks ...*task) *host {
	h := &host{cpu: cpu{tasks: tasks}, every: every, late: late}
	for _, k := range tasks {
		h.ledgers = append(h.ledgers, New(cgroup.Bandwidth{Quota: k.quota, Period: k.period}))
		h.lowest = append(h.lowest, k.quota)
	}
	return h
}

func (h *host) run(length time.Duration) {
	for end := h.now + length; h.now < end; {
		h.step()
		for i, k := range h.tasks {
			at := h.now - k.phase - h.late
			if at < 0 || at%(time.Duration(h.every)*k.period) >= tick {
				continue
			}
			l := h.ledgers[i]
			if q := l.Step(k.c); q != k.quota {
				k.write(q)
				l.Wrote(q)
			}
			if h.reserve > 0 {
				k.budget = l.Budget(h.reserve)
			}
			h.lowest[i] = min(h.lowest[i], k.quota)
		}
	}
}
