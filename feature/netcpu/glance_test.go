package netcpu

import (
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// An error in each window does not fill the log, whatever its text.
func TestFailedWindowsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		n := &Netcpu{cfg: Config{Host: feature.Host{Log: slog.New(slog.NewTextHandler(&log, nil))}}}
		told := n.failed("following")
		for range 601 {
			told(errors.New(time.Now().String()))
			told(nil)
			time.Sleep(law.Window)
		}
		if lines, all := strings.Count(log.String(), "\n"), strings.Count(log.String(), "windows=60 "); lines != 11 || all != 10 {
			t.Errorf("logged %d times, %d of them of 60 windows, want 11 and 10", lines, all)
		}
	})
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
