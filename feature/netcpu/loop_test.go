package netcpu

import (
	"errors"
	"testing"
	"time"
)

// An error in each window fills no log, whatever it says.
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
		now = now.Add(window)
	}
	if logged != 11 || windows != 601 {
		t.Errorf("logged %d times of %d windows, want 11 of 601", logged, windows)
	}
}
