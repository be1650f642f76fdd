package isolate

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

func TestControl(t *testing.T) {
	second := func(intruding, supers uint64) window { return window{time.Second, intruding, supers} }
	bulk, mixed, quiet, between := second(500, 40_000), second(100_000, 40_000), second(10, 0), second(15_000, 40_000)
	for _, c := range []struct {
		name    string
		windows []window
		want    []shape
	}{
		{"bulk", []window{bulk, bulk, bulk, bulk}, []shape{single, single, super, super}},
		{"bulk with a flood beside it", []window{bulk, bulk, bulk, mixed, mixed}, []shape{single, single, super, single, single}},
		{"bulk that is interrupted", []window{bulk, bulk, quiet, bulk, bulk, bulk}, []shape{single, single, single, single, single, super}},
		{"idle after bulk stays as it is", []window{bulk, bulk, bulk, quiet, quiet}, []shape{single, single, super, super, super}},
		{"between the bounds nothing changes", []window{between, between, between, between}, []shape{single, single, single, single}},
		{"between the bounds nothing changes back", []window{bulk, bulk, bulk, between, between}, []shape{single, single, super, super, super}},
		{"no time", []window{{0, 1 << 40, 0}, bulk, bulk, bulk, {0, 1 << 40, 0}}, []shape{single, single, single, super, super}},
		{"short window", []window{{10 * time.Millisecond, 300, 0}, {10 * time.Millisecond, 5, 400}}, []shape{single, single}},
		{"bulk that ends while others' time is taken", []window{bulk, bulk, bulk, second(6_000, 0)}, []shape{single, single, super, single}},
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

// A container that floods as soon as it gets super-packets has them for a smaller and smaller part
// of the time, and is trusted again after a minute without a flood.
func TestControlRelapse(t *testing.T) {
	bulk, flood := window{time.Second, 500, 40_000}, window{time.Second, 400_000, 0}
	var c control
	waits := func() (n int) {
		for n = 1; c.next(bulk) == single; n++ {
		}
		return n
	}
	for i, want := range []int{3, 6, 12, 24, 48, 60, 60} {
		if got := waits(); got != want {
			t.Errorf("super-packets after %d windows the time %d, want %d", got, i+1, want)
		}
		if c.next(flood) != single {
			t.Error("a flood is left unisolated")
		}
	}
	waits()
	for range int(law.Long / law.Window) {
		c.next(bulk)
	}
	c.next(flood)
	if got := waits(); got != 6 {
		t.Errorf("super-packets after %d windows, want 6 as after the first relapse", got)
	}
	// Three seconds of bulk and one of flood, again and again.
	c = control{}
	unisolated := 0
	for range 100 {
		for _, w := range []window{bulk, bulk, bulk, flood} {
			if c.shape == super {
				unisolated++
			}
			c.next(w)
		}
	}
	if unisolated != 1 {
		t.Errorf("%d of 400 windows were left unisolated, want the first flood alone", unisolated)
	}
}

// Whatever came before, a window with too many single packets isolates at once, and super-packets
// are never chosen before the patience has passed.
func TestControlIsSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c control
		since := time.Duration(0) // since single was last forced
		for range rapid.IntRange(1, 60).Draw(t, "n") {
			w := window{
				length:    time.Duration(rapid.Int64Range(0, int64(5*time.Second)).Draw(t, "length")),
				intruding: rapid.Uint64Range(0, 1<<20).Draw(t, "intruding"),
				super:     rapid.Uint64Range(0, 1<<20).Draw(t, "super"),
			}
			got := c.next(w)
			since += w.length
			if w.length > 0 && float64(w.intruding)/w.length.Seconds() > law.Single {
				since = 0
				if got != single {
					t.Fatalf("%+v left the packets unisolated", w)
				}
			}
			if got == super && since < law.Patience {
				t.Fatalf("super-packets after %v", since)
			}
		}
	})
}

func TestQueueControl(t *testing.T) {
	own := func(slot uint32, n uint64) queueWindow {
		return queueWindow{time.Second, drop.Queue{Own: n, Slot: slot}}
	}
	mixed := func(slot uint32) queueWindow {
		return queueWindow{time.Second, drop.Queue{Own: 20_000, Others: 1, Slot: slot}}
	}
	stale := func(packets uint64) queueWindow {
		return queueWindow{time.Second / 5, drop.Queue{Own: 4_000, Stale: packets, Slot: 7}}
	}
	a := own(7, 20_000)
	for _, c := range []struct {
		name    string
		windows []queueWindow
		want    []uint32
	}{
		{"one container", []queueWindow{mixed(7), a, a, a, own(7, 10)}, []uint32{nobody, nobody, nobody, 7, 7}},
		{"too little to be worth it", []queueWindow{own(7, 10), own(7, 10), own(7, 10), own(7, 10)}, []uint32{nobody, nobody, nobody, nobody}},
		{"lost with one packet", []queueWindow{a, a, a, mixed(7), a, a, a}, []uint32{nobody, nobody, 7, nobody, nobody, nobody, nobody}},
		{"kept while idle", []queueWindow{a, a, a, own(7, 0)}, []uint32{nobody, nobody, 7, 7}},
		{"kept after a pause", []queueWindow{a, a, a, stale(200)}, []uint32{nobody, nobody, 7, 7}},
		{"address that nobody confirms", []queueWindow{a, a, a, stale(900)}, []uint32{nobody, nobody, 7, nobody}},
		{"the same, slowly", []queueWindow{a, a, a, stale(200), stale(200), stale(200)}, []uint32{nobody, nobody, 7, 7, 7, nobody}},
		{"two pauses", []queueWindow{a, a, a, stale(400), a, stale(400)}, []uint32{nobody, nobody, 7, 7, 7, 7}},
		{"taken over", []queueWindow{a, a, a, mixed(8), own(8, 20_000), own(8, 20_000), own(8, 20_000), own(8, 20_000), own(8, 20_000), own(8, 20_000)}, []uint32{nobody, nobody, 7, nobody, nobody, nobody, nobody, nobody, nobody, 8}},
		{"a flood", []queueWindow{mixed(7), {time.Second / 5, drop.Queue{Own: 10_000, Slot: 7}}}, []uint32{nobody, 7}},
		{"a flood of a queue that others use", []queueWindow{own(7, 90_000), mixed(7), own(7, 90_000), own(7, 90_000), own(7, 90_000)}, []uint32{7, nobody, nobody, nobody, nobody}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctl := newQueueControl()
			for i, w := range c.windows {
				if got := ctl.next(w, law.Rate, law.Flood); got != c.want[i] {
					t.Errorf("after window %d (%+v): %d, want %d", i, w, got, c.want[i])
				}
			}
		})
	}
}

// A queue with a packet of another has no owner afterwards, and the patience stays within bounds.
func TestQueueControlIsSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := newQueueControl()
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			w := queueWindow{time.Second, drop.Queue{
				Own:    rapid.Uint64Range(0, 5000).Draw(t, "own"),
				Others: rapid.SampledFrom([]uint64{0, 0, 0, 0, 1, 5}).Draw(t, "others"),
				Slot:   rapid.Uint32Range(0, 2).Draw(t, "slot"),
			}}
			before := c.owner
			got := c.next(w, law.Rate, law.Flood)
			switch {
			case w.Others > 0 && got != nobody:
				t.Fatalf("%+v left the queue with %d", w, got)
			case got != before && got != nobody && got != w.Slot:
				t.Fatalf("%+v gave the queue to %d", w, got)
			case c.patience < law.Patience || c.patience > law.Long:
				t.Fatalf("patience %d", c.patience)
			}
		}
	})
}
