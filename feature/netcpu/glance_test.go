package netcpu

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// An error in each window does not fill the log, whatever its text.
func TestFailedWindowsAreLogged(t *testing.T) {
	var failed failedWindows
	now, logged, windows := time.Unix(1000, 0), 0, 0
	for range 601 {
		if w := failed.report(now, errors.New(now.String())); w > 0 {
			logged++
			windows += w
		}
		if failed.report(now, nil) != 0 {
			t.Error("logged that nothing went wrong")
		}
		now = now.Add(law.Window)
	}
	if logged != 11 || windows != 601 {
		t.Errorf("logged %d times of %d windows, want 11 of 601", logged, windows)
	}
}

// A call that hangs with the lock held keeps the loop from all isolated containers: the loop's
// state shows that, if later than for a loop that hangs itself.
func TestLoopBehindACall(t *testing.T) {
	n := &Netcpu{following: feature.Loop{Bound: feature.BehindCalls}, isolator: isolate.New(isolate.Config{})}
	n.mu.Lock()
	done := make(chan error)
	go func() { done <- n.look(time.Now(), true) }()
	for n.following.Busy().IsZero() {
		runtime.Gosched()
	}
	n.mu.Unlock()
	testkit.Check(t, <-done)
	if !n.following.Busy().IsZero() {
		t.Error("the turn does not end")
	}
}
