package isolate

import (
	"testing"
	"time"
)

func TestRestControl(t *testing.T) {
	const fifth = time.Second / 5
	busy := restWindow{length: fifth, ran: fifth / 5, single: 5000, super: 10}
	with := func(change func(*restWindow)) restWindow {
		w := busy
		change(&w)
		return w
	}
	flood := with(func(w *restWindow) { w.flood = true })
	owned := with(func(w *restWindow) { w.owned = true })
	idle := with(func(w *restWindow) { w.idle = fifth / 5 })
	little := with(func(w *restWindow) { w.idle = fifth / 10 })
	light := with(func(w *restWindow) { w.ran = 0 })
	bulk := with(func(w *restWindow) { w.single, w.super = 10, 1000 })
	type step struct {
		w    restWindow
		n    int
		want bool // after the last
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"after five seconds without idle time", []step{{busy, 24, false}, {busy, 1, true}}},
		{"an idle CPU takes the threads", []step{{idle, 100, false}}},
		{"also a little idle time, at first", []step{{little, 100, false}}},
		{"but not enough to end a rest", []step{{busy, 25, true}, {little, 100, true}}},
		{"which more does within a second", []step{{busy, 25, true}, {idle, 4, true}, {idle, 1, false}}},
		{"light work", []step{{light, 100, false}}},
		{"bulk", []step{{bulk, 100, false}}},
		{"bulk just before", []step{{busy, 20, false}, {bulk, 5, false}, {busy, 24, false}, {busy, 1, true}}},
		{"a flood", []step{{flood, 100, false}}},
		{"a flood ends a rest at once", []step{{busy, 25, true}, {flood, 1, false}, {busy, 24, false}}},
		{"so does an owner", []step{{busy, 25, true}, {owned, 1, false}}},
		{"an owner", []step{{owned, 100, false}}},
		{"and bulk, within a second", []step{{busy, 25, true}, {bulk, 4, true}, {bulk, 1, false}}},
		{"resting uplinks do nothing", []step{{busy, 25, true}, {light, 100, true}}},
		{"a minute", []step{{busy, 25, true}, {busy, 299, true}, {busy, 1, false}}},
	} {
		var ctl restControl
		for i, s := range c.steps {
			got := false
			for range s.n {
				got = ctl.next(s.w)
			}
			if got != s.want {
				t.Errorf("%s: step %d: rests %t, want %t", c.name, i, got, s.want)
			}
		}
	}
}
