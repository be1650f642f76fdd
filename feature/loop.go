package feature

import (
	"sync/atomic"
	"time"
)

// Looper is a Feature with loops of its own, beside the agent's calls. Loops is
// called once. An agent one of whose loops hangs gives no sign of life.
type Looper interface {
	Loops() []*Loop
}

// Loop tells from outside whether a loop hangs. The loop calls Begin and End around
// what takes milliseconds, but not around a wait for work.
type Loop struct {
	Name string // for the log, after the feature's: "traffic of devices"
	// Bound is how long a turn may take; 0 is the agent's own bound. It is BehindCalls
	// for a loop that waits for a mutex that Apply holds.
	Bound time.Duration
	began atomic.Pointer[time.Time] // nil: idle; with the monotonic reading, as the clock may be set meanwhile
}

// BehindCalls is the Bound of a loop that an Apply which hangs keeps from its work for
// all containers: longer than any call that returns.
const BehindCalls = time.Minute

// Begin says that a turn begins.
func (l *Loop) Begin() { now := time.Now(); l.began.Store(&now) }

// End says that the turn is over.
func (l *Loop) End() { l.began.Store(nil) }

// Busy gives when the turn began that is not over, or the zero time.
func (l *Loop) Busy() time.Time {
	if began := l.began.Load(); began != nil {
		return *began
	}
	return time.Time{}
}
