package agent

import (
	"testing"
	"time"
	"unsafe"
)

// step returns a time as read after the clock was set: the wall clock is ahead and the monotonic
// one is not. Package time offers no way to that; its first word holds nanoseconds in 30 bits, and
// above them seconds (time.go, hasMonotonic).
func step(t *testing.T, at time.Time, by time.Duration) time.Time {
	t.Helper()
	was := at
	*(*uint64)(unsafe.Pointer(&at)) += uint64(by/time.Second) << 30
	if at.Sub(was) != 0 || at.Round(0).Sub(was.Round(0)) != by {
		t.Fatalf("%v is %v by a clock set by %v", was, at, by)
	}
	return at
}

// A step of the clock (the first word of NTP, say) is no time that passed: what a controller
// decided stands, on the host too.
func TestClockStep(t *testing.T) {
	r := newRig(t, 1)
	r.set.set(true, box(1, "observe"))
	r.start()
	r.agent.Decide(decision(1, "isolate", time.Now().Add(time.Hour)))
	r.untilValue(1, "isolated")
	for _, by := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		now := step(t, time.Now(), by)
		if r.agent.lapse(now); r.host.get(t, 1) != "isolated" {
			t.Errorf("after a step of %v it is undone", by)
		}
		if left := r.agent.journal.Expired(now); len(left) > 0 {
			t.Errorf("after a step of %v: %+v has lapsed", by, left)
		}
		r.agent.mu.Lock()
		next := r.agent.lapses
		r.agent.mu.Unlock()
		if next.Sub(now) < 50*time.Minute {
			t.Errorf("after a step of %v something is to lapse in %v", by, next.Sub(now))
		}
	}
}
