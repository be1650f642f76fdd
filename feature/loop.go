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
	began atomic.Int64 // in ns since 1970; 0: idle
}

// BehindCalls is the Bound of a loop that an Apply which hangs keeps from its work for
// all containers: longer than any call that returns.
const BehindCalls = time.Minute

// Begin says that a turn begins.
func (l *Loop) Begin() { l.began.Store(time.Now().UnixNano()) }

// End says that the turn is over.
func (l *Loop) End() { l.began.Store(0) }

// Busy gives when the turn began that is not over, or the zero time.
func (l *Loop) Busy() time.Time {
	if began := l.began.Load(); began != 0 {
		return time.Unix(0, began)
	}
	return time.Time{}
}
