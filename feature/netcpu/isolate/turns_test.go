package isolate

import "testing"

func TestNiceBy(t *testing.T) {
	for _, x := range []struct {
		turns, packets uint64
		prompt, even   string // what it is after these two
	}{
		{0, 0, prompt, prompt},
		{20, 80, even, even},
		{1000, 1000, prompt, prompt},
		{1000, 1499, prompt, prompt},
		{1000, 1500, prompt, even},
		{1000, 2000, even, even},
		{8000, 80_000, even, even},
	} {
		if one, two := niceBy(prompt, x.turns, x.packets), niceBy(even, x.turns, x.packets); one != x.prompt || two != x.even {
			t.Errorf("%d turns for %d packets: nice %s and %s, want %s and %s", x.turns, x.packets, one, two, x.prompt, x.even)
		}
	}
}
