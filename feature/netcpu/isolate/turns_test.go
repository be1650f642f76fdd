package isolate

import (
	"slices"
	"testing"
	"time"
)

func TestTurnControl(t *testing.T) {
	window := func(turns uint64, each float64, wait time.Duration) turnWindow {
		return turnWindow{time.Duration(turns) * wait, turns, uint64(float64(turns) * each)}
	}
	const short, long = 80 * time.Microsecond, 3 * time.Millisecond
	light, single := window(1000, 1, short), window(8000, 1, short)
	server, yielding := window(8000, 4, short), window(4000, 10, short)
	late := window(4000, 10, long)   // as many packets, though each waits
	starved := window(1000, 8, long) // a task of the container computes
	apart := window(8000, 1.8, short)

	many := func(n int, w turnWindow) (list []turnWindow) {
		for range n {
			list = append(list, w)
		}
		return list
	}
	for name, steps := range map[string]struct {
		windows []turnWindow
		want    []turn // after the last ones of them
	}{
		"light":                                 {[]turnWindow{light, {}, window(1000, 1.8, short), window(20, 4, short), window(1000, 3, short), {}}, []turn{prompt, prompt, prompt, prompt, even, prompt}},
		"a server":                              {[]turnWindow{server, yielding, yielding, apart, light}, []turn{yield, yield, yield, yield, prompt}},
		"one client gains nothing":              {[]turnWindow{single, single, single, single, single, single}, []turn{yield, prompt, prompt, prompt, yield, prompt}},
		"a task that computes":                  {[]turnWindow{server, starved, server, server, server, starved}, []turn{yield, even, even, even, yield, even}},
		"the same, for one client":              {[]turnWindow{single, window(500, 1, long)}, []turn{yield, prompt}},
		"a slow server is doubted now and then": {append(append([]turnWindow{server}, many(9, late)...), server, late), []turn{even, yield, yield}},
		"a task begins to compute":              {append(append([]turnWindow{server}, many(9, yielding)...), starved, server, server), []turn{even, even, even}},
	} {
		var c turnControl
		var got []turn
		for _, w := range steps.windows {
			got = append(got, c.next(w))
		}
		if last := got[len(got)-len(steps.want):]; !slices.Equal(last, steps.want) {
			t.Errorf("%s: %v, want %v at the end", name, got, steps.want)
		}
	}
	// Each time that it gives up it waits longer, up to a bound.
	var c turnControl
	tries := 0
	for w := server; tries < 1000; tries++ {
		if c.next(w) == yield {
			w = starved
		} else {
			w = server
		}
		if tries > 300 && c.patience != longest {
			t.Fatalf("after %d windows: %+v", tries, c)
		}
	}
	// After that long without, it is forgotten.
	for range longest + 2*forget {
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
