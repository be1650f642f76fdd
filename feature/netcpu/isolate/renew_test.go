package isolate

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The NAPIs of a tenant with live threads are listed from time to time, and at once when a thread
// has ended; for a minute after a change they are listed in each window.
func TestAsking(t *testing.T) {
	var a asking
	asked := func(windows int, live bool) (n int) {
		for range windows {
			if a.due(live) {
				n++
			}
		}
		return n
	}
	if got := asked(1, true); got != 1 {
		t.Errorf("at first: asked %d times", got)
	}
	if got := asked(10*askEvery, true); got != 10 {
		t.Errorf("at rest: asked %d times in %d windows", got, 10*askEvery)
	}
	if got := asked(5, false); got != 5 {
		t.Errorf("without its threads: asked %d times in 5 windows", got)
	}
	a.others()
	if got := asked(askAgain-1, true); got != askAgain-1 {
		t.Errorf("after a change: asked %d times in %d windows", got, askAgain-1)
	}
	if got := asked(10*askEvery, true); got > 11 {
		t.Errorf("a minute later: asked %d times in %d windows", got, 10*askEvery)
	}
}

func TestLives(t *testing.T) {
	if (&isolation{}).lives("/proc") {
		t.Error("a tenant without threads has some that live")
	}
	ended := &isolation{threads: []thread{{Thread: sched.Thread{TID: os.Getpid(), Start: 1}}}}
	if ended.lives("/proc") {
		t.Error("a number that is another's by now lives")
	}
}
