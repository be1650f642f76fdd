package backoff

import (
	"testing"
	"time"
)

func TestBackoff(t *testing.T) {
	const first, most, forget = 3 * time.Second, 20 * time.Second, time.Minute
	var wait time.Duration
	for n, want := range []time.Duration{0, 3, 6, 12, 20, 20} {
		if want *= time.Second; wait != want || Nth(n, first, most) != want {
			t.Errorf("after %d failures %v and %v, want %v", n, wait, Nth(n, first, most), want)
		}
		wait = Next(wait, first, most)
	}
	if got := Again(wait, first, most, forget, forget); got != most {
		t.Errorf("again in time: %v", got)
	}
	if got := Again(wait, first, most, forget+1, forget); got != first {
		t.Errorf("forgotten: %v", got)
	}
	if got := Nth(1<<40, 1, 1<<62); got != 1<<62 {
		t.Errorf("after many failures: %v", got)
	}
}
