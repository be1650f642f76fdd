package netcpu

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestControl(t *testing.T) {
	second := func(small, supers uint64) window { return window{time.Second, small, supers} }
	bulk, flood, mixed, quiet, between := second(500, 40_000), second(400_000, 0), second(100_000, 40_000), second(10, 0), second(15_000, 40_000)
	for _, c := range []struct {
		name    string
		windows []window
		want    []shape
	}{
		{"bulk", []window{bulk, bulk, bulk, bulk}, []shape{single, single, super, super}},
		{"flood", []window{flood, flood, flood, flood}, []shape{single, single, single, single}},
		{"bulk with a flood beside it", []window{bulk, bulk, bulk, mixed, mixed}, []shape{single, single, super, single, single}},
		{"bulk that is interrupted", []window{bulk, bulk, quiet, bulk, bulk, bulk}, []shape{single, single, single, single, single, super}},
		{"idle after bulk stays as it is", []window{bulk, bulk, bulk, quiet, quiet}, []shape{single, single, super, super, super}},
		{"between the bounds nothing changes", []window{between, between, between, between}, []shape{single, single, single, single}},
		{"between the bounds nothing changes back", []window{bulk, bulk, bulk, between, between}, []shape{single, single, super, super, super}},
		{"no time", []window{{0, 1 << 40, 0}, bulk, bulk, bulk, {0, 1 << 40, 0}}, []shape{single, single, single, super, super}},
		{"short window", []window{{10 * time.Millisecond, 300, 0}, {10 * time.Millisecond, 5, 400}}, []shape{single, single}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var ctl control
			for i, w := range c.windows {
				if got := ctl.next(w); got != c.want[i] {
					t.Errorf("after window %d (%+v): %v, want %v", i, w, got, c.want[i])
				}
			}
		})
	}
}

// Whatever has come before, a window with too many single packets isolates at
// once, and super-packets are never chosen in less than the patience.
func TestControlIsSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c control
		since := 0 // windows since single was last forced
		for range rapid.IntRange(1, 60).Draw(t, "n") {
			w := window{
				length: time.Duration(rapid.Int64Range(0, int64(5*time.Second)).Draw(t, "length")),
				small:  rapid.Uint64Range(0, 1<<20).Draw(t, "small"),
				super:  rapid.Uint64Range(0, 1<<20).Draw(t, "super"),
			}
			got := c.next(w)
			since++
			if w.length > 0 && float64(w.small)/w.length.Seconds() > smallMax {
				since = 0
				if got != single {
					t.Fatalf("%+v left the packets unisolated", w)
				}
			}
			if got == super && since < patience {
				t.Fatalf("super-packets after %d windows", since)
			}
		}
	})
}
