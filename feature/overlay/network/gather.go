package network

import (
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Interval is the least time between two calls of do.
const Interval = 100 * time.Millisecond

// mostGathered limits the distinct changes of one call.
const mostGathered = 64

// Gather passes changes on: the first at once, and those that soon follow together. It is safe for
// concurrent use.
type Gather struct {
	now   func() time.Time
	after func(time.Duration, func())
	do    func([]netdev.Change)

	mu      sync.Mutex
	changes []netdev.Change // distinct changes that wait
	last    time.Time       // of the last call; zero: never
	waits   bool            // a call of later is due
	closed  bool
	calls   sync.Mutex // one call of do at a time
}

// NewGather makes a Gather that calls do, one call at a time. now is its clock, and after calls a
// function, from another goroutine, when a time has passed.
func NewGather(now func() time.Time, after func(time.Duration, func()), do func([]netdev.Change)) *Gather {
	return &Gather{now: now, after: after, do: do}
}

// Tell takes changes, and returns once they are passed on, or scheduled. Changes within [Interval]
// of the last call wait for its end.
func (g *Gather) Tell(changes []netdev.Change) {
	g.mu.Lock()
	for _, c := range changes {
		if !slices.Contains(g.changes, c) {
			g.changes = append(g.changes, c)
		}
	}
	if len(g.changes) > mostGathered {
		g.changes = []netdev.Change{{Cause: netdev.Overrun}}
	}
	now := g.now()
	left := Interval - now.Sub(g.last)
	switch {
	case len(g.changes) == 0 || g.waits || g.closed:
		g.mu.Unlock()
	case g.last.IsZero() || left <= 0:
		g.last = now
		g.mu.Unlock()
		g.pass()
	default:
		g.waits = true
		g.mu.Unlock()
		g.after(left, func() {
			g.mu.Lock()
			g.waits, g.last = false, g.now()
			g.mu.Unlock()
			g.pass()
		})
	}
}

func (g *Gather) pass() {
	g.calls.Lock()
	defer g.calls.Unlock()
	g.mu.Lock()
	changes, closed := g.changes, g.closed
	g.changes = nil
	g.mu.Unlock()
	if len(changes) > 0 && !closed {
		g.do(changes)
	}
}

// Close ends it: when it returns no call is under way, and none comes. do must not call it.
func (g *Gather) Close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.calls.Lock()
	defer g.calls.Unlock()
}
