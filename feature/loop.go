package feature

import (
	"sync/atomic"
	"time"
)

// Loop lets the agent see whether a loop hangs, and contain its panics. The loop calls Begin and End
// around work that takes milliseconds, but not around a wait for work. Everything that it does, but
// for waits, is in a Turn, and so is what a callback from another goroutine does.
type Loop struct {
	Name string // for the log, after the feature's: "traffic of devices"
	// Bound limits how long a turn may take; 0 means the agent's own bound. Use BehindCalls for
	// a loop that waits for a mutex that Apply holds.
	Bound time.Duration
	began atomic.Pointer[time.Time] // nil: idle; with the monotonic reading, as the clock may be set meanwhile
	by    atomic.Pointer[func(turn func())]
}

// BehindCalls is the Bound of a loop that a hanging Apply keeps from its work for all containers.
// It is longer than any call that returns.
const BehindCalls = time.Minute

// Begin marks the beginning of a turn.
func (l *Loop) Begin() { now := time.Now(); l.began.Store(&now) }

// End marks the end of the turn.
func (l *Loop) End() { l.began.Store(nil) }

// Turn calls turn, the way that the last Contain has said. turn must leave no mutex held if it
// panics. After a panic Turn returns, and for some time it does not call turn, so a loop must not
// rely on a Turn to wait.
func (l *Loop) Turn(turn func()) {
	if by := l.by.Load(); by != nil {
		(*by)(turn)
		return
	}
	turn()
}

// Contain has by make each Turn from now on. The agent calls it.
func (l *Loop) Contain(by func(turn func())) { l.by.Store(&by) }

// Busy returns when the current turn began, or the zero time if there is none.
func (l *Loop) Busy() time.Time {
	if began := l.began.Load(); began != nil {
		return *began
	}
	return time.Time{}
}
