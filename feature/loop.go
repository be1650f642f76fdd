package feature

import (
	"sync/atomic"
	"time"
)

// Loop lets the agent see whether a loop hangs, and contain its panics. The loop calls Begin and End
// around work that takes milliseconds, but not around a wait for work. All its work runs inside Turn,
// and so does the work of a callback from another goroutine.
type Loop struct {
	Name string // for the log, after the feature's: "traffic of devices"
	// Bound limits how long a turn may take; 0 means the agent's own bound. Use BehindCalls for
	// a loop that waits for a mutex that Apply holds.
	Bound time.Duration
	began atomic.Pointer[time.Time] // nil: idle; with the monotonic reading, as the clock may be set meanwhile
	by    atomic.Pointer[func(turn func())]
}

// BehindCalls is the Bound of a loop that a hanging Apply blocks for all containers. It is longer than
// any call that returns.
const BehindCalls = time.Minute

// Begin marks the beginning of a turn.
func (l *Loop) Begin() { now := time.Now(); l.began.Store(&now) }

// End marks the end of the turn.
func (l *Loop) End() { l.began.Store(nil) }

// Turn calls turn, through the function of the last Contain if there is one. turn must release its
// mutexes even if it panics. After a panic Turn returns, and skips turn for some time, so a loop must
// not rely on a Turn to wait.
func (l *Loop) Turn(turn func()) {
	if by := l.by.Load(); by != nil {
		(*by)(turn)
		return
	}
	turn()
}

// Contain makes every later Turn go through by. The agent calls it.
func (l *Loop) Contain(by func(turn func())) { l.by.Store(&by) }

// Busy returns when the current turn began, or the zero time if there is none.
func (l *Loop) Busy() time.Time {
	if began := l.began.Load(); began != nil {
		return *began
	}
	return time.Time{}
}
