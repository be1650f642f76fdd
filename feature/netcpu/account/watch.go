package account

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/irq"
)

const (
	// tick is the time between two looks at the kernel's counters. It is hurriedTick while a mode may act
	// on a change, which has to happen within a second.
	tick        = law.Window
	hurriedTick = tick / 4

	// The pause before the next window doubles from firstPause to lastPause, because prices change less
	// and less. Readings of the accounts in the steady phase have the same pauses.
	firstPause = tick
	lastPause  = law.Calm

	// A change in the kernel's counters ends a pause, but at most mostChanges times in changesIn:
	// on some hosts the counters change all the time.
	mostChanges = 4
	changesIn   = 2 * lastPause

	// The tasks on a CPU have changed if its idle time in a second falls by changedIdle. The new tasks
	// may be robbed if the CPU has at least few softirqs with packets.
	changedIdle = tick / 4

	// A container's packets have changed if their rate halves or doubles, by more than few in a second.
	// The softirq time of a CPU has changed if it grows by half plus changedTime in a second. That is
	// less than Seen, but more than a single step of 10 ms, the kernel's unit, shows after one look.
	changedTime = 8 * time.Millisecond
)

// watch decides when a window opens and how long it is, from counters that the kernel keeps anyway.
// The zero value is ready.
type watch struct {
	looked time.Time
	passed counts // at that look
	works  map[int]irq.Work

	now, priced traffic // at the last look, and at the end of the last window or reading
	rate        float64 // packets, or softirqs if there are more, in a second

	hurried bool // a mode may act on a change
	pause   time.Duration
	due     time.Time   // next window
	changed []time.Time // windows that changes have opened
}

// traffic holds rates per second, as a mean of some looks in which the last counts most. The mean of
// softirqs spans two ticks, the others one.
type traffic struct {
	packets  map[container.ID]float64
	softirqs map[int]time.Duration // time of softirqs, by CPU
	network  map[int]float64       // number of softirqs with packets, by CPU
	idle     map[int]time.Duration // by CPU
}

// tick returns the time until the next look.
func (w *watch) tick() time.Duration {
	if w.hurried {
		return hurriedTick
	}
	return tick
}

// look compares the kernel's counters with the last look, unless that is too recent for a rate.
func (w *watch) look(now time.Time, counts counts, works map[int]irq.Work) {
	elapsed := now.Sub(w.looked)
	if elapsed < w.tick()/2 {
		return
	}
	second := float64(time.Second) / float64(elapsed)
	part := min(1, float64(elapsed)/float64(tick))
	t := traffic{make(map[container.ID]float64, len(counts)), make(map[int]time.Duration, len(works)), make(map[int]float64, len(works)), make(map[int]time.Duration, len(works))}
	var packets, softirqs float64
	for id, c := range counts.since(w.passed) {
		t.packets[id] = mean(w.now.packets[id], float64(c.in+c.out)*second, part)
		packets += t.packets[id]
	}
	for cpu, work := range works {
		was, known := w.works[cpu]
		if !known || work.Network < was.Network || work.Time < was.Time {
			continue // the CPU was offline
		}
		t.network[cpu] = mean(w.now.network[cpu], float64(work.Network-was.Network)*second, part)
		t.idle[cpu] = mean(w.now.idle[cpu], scaled(max(0, work.Idle-was.Idle), second), part) // the kernel may take some back
		softirqs += t.network[cpu]
		t.softirqs[cpu] = mean(w.now.softirqs[cpu], scaled(work.Time-was.Time, second), part/2)
	}
	w.rate = max(packets, softirqs)
	w.looked, w.passed, w.works, w.now = now, counts, works, t
}

// mean moves was a part of the way to now.
func mean[N float64 | time.Duration](was, now N, part float64) N {
	return was + N(float64(now-was)*part)
}

// changes reports whether the traffic differs from that of the last window.
func (w *watch) changes() bool {
	for id, n := range w.now.packets {
		was := w.priced.packets[id]
		if math.Abs(n-was) > few && (n > 2*was || 2*n < was) {
			return true
		}
	}
	for cpu, d := range w.now.softirqs {
		if was := w.priced.softirqs[cpu]; d > was+was/2+changedTime {
			return true
		}
	}
	for cpu, n := range w.now.network {
		if was, known := w.priced.idle[cpu]; known && n >= few && was-w.now.idle[cpu] > changedIdle {
			return true
		}
	}
	return false
}

// opens reports whether a window opens now.
func (w *watch) opens(now time.Time) bool {
	if !now.Before(w.due) {
		return true
	}
	w.changed = slices.DeleteFunc(w.changed, func(t time.Time) bool { return now.Sub(t) > changesIn })
	if len(w.changed) >= mostChanges || !w.changes() {
		return false
	}
	w.changed = append(w.changed, now)
	if w.hurried {
		w.pause = 0 // the window may miss tasks that run by turns
	}
	return true
}

// soon makes the next window open within two seconds, for a container without a price.
func (w *watch) soon(now time.Time) {
	if by := now.Add(2 * tick); by.Before(w.due) {
		w.due = by
	}
}

// rest begins the pause after a window.
func (w *watch) rest(now time.Time) {
	w.priced = w.now
	w.pause = backoff.Next(w.pause, firstPause, lastPause)
	// The pause is random, so that windows neither follow nor miss periodic traffic.
	w.due = now.Add(w.pause*3/4 + rand.N(w.pause/2))
}

// length returns the length of a window, in which all programs are attached.
func (w *watch) length() time.Duration {
	return min(max(scaled(time.Second, budget/max(w.rate, 1)), shortest), longest)
}
