package isolate

import (
	"testing"
	"time"
)

func TestTurnControl(t *testing.T) {
	window := func(each float64, wait time.Duration) turnWindow {
		const turns = 1000
		return turnWindow{turns * wait, turns, uint64(turns * each)}
	}
	const short, long = 80 * time.Microsecond, 3 * time.Millisecond
	light, server, beside := window(1, short), window(4, short), window(4, long)

	var c turnControl
	for i, step := range []struct {
		w    turnWindow
		want turn
	}{
		{light, prompt},
		{turnWindow{}, prompt},
		{window(1.8, short), prompt}, // a gap between the bounds
		{server, yield},
		{server, yield},
		{window(1.8, short), yield},
		{light, prompt},
		{server, yield},
		{beside, even}, // who computes beside it would keep it waiting
		{server, even},
		{server, even},
		{server, yield}, // after patience windows it tries again
		{beside, even},
		{light, prompt},
	} {
		if got := c.next(step.w); got != step.want {
			t.Fatalf("step %d: %+v gives %v, want %v", i, step.w, got, step.want)
		}
	}
	// Each time that it gives up it waits longer, up to a bound.
	tries := 0
	for range 1000 {
		if c.next(beside) == yield {
			tries++
		}
	}
	if tries < 10 || tries > 30 {
		t.Errorf("it tries to yield %d times in 1000 windows", tries)
	}
	// It is forgotten after that long without.
	for range longest + forget + 1 {
		c.next(server)
	}
	if c.turn != yield || c.patience != 0 {
		t.Errorf("after a long time without waiting: %+v", c)
	}
}

func TestTurnNice(t *testing.T) {
	if prompt.nice() != "-5" || even.nice() != "0" || yield.nice() != "15" {
		t.Error(prompt.nice(), even.nice(), yield.nice())
	}
}
