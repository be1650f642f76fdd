package network

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// clock is one that a test sets.
type clock struct {
	time  time.Time
	wakes time.Time // when the waiting function is called; zero: none waits
	what  func()
}

func (c *clock) now() time.Time { return c.time }

func (c *clock) after(d time.Duration, what func()) { c.wakes, c.what = c.time.Add(d), what }

func (c *clock) pass(d time.Duration) {
	end := c.time.Add(d)
	if what := c.what; what != nil && !c.wakes.After(end) {
		c.time, c.what = c.wakes, nil
		what()
	}
	c.time = end
}

func TestGather(t *testing.T) {
	c := &clock{time: time.Unix(1000, 0)}
	var got [][]netdev.Change
	g := NewGather(c.now, c.after, func(changes []netdev.Change) { got = append(got, changes) })
	told := func(when string, want ...[]netdev.Change) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
		got = nil
	}
	link, route := netdev.Change{Cause: netdev.LinkChanged, Device: 1}, netdev.Change{Cause: netdev.RouteChanged}
	one := []netdev.Change{link}
	g.Tell(nil)
	told("nothing")
	g.Tell(one)
	told("the first", one)
	g.Tell(one)
	g.Tell([]netdev.Change{route, link})
	c.pass(Interval - 1)
	told("too soon")
	c.pass(1)
	told("then together", []netdev.Change{link, route})
	c.pass(Interval - 1)
	g.Tell(one)
	told("too soon again")
	c.pass(Interval)
	told("once", one)
	c.pass(2 * Interval)
	g.Tell(one)
	told("after a pause", one)
	for i := range 2 * mostGathered {
		g.Tell([]netdev.Change{{Cause: netdev.LinkChanged, Device: i}})
	}
	c.pass(Interval)
	if len(got) != 1 || len(got[0]) > mostGathered || got[0][0].Cause != netdev.Overrun {
		t.Errorf("of many: %v", got)
	}
	got = nil
	g.Tell(one)
	g.Close()
	c.pass(Interval)
	g.Tell(one)
	told("after the end")
}

// However many tell, calls do not overlap, and nothing is lost.
func TestGatherTogether(t *testing.T) {
	const tellers, each = 8, 200
	var calls, look sync.Mutex
	seen := make(map[netdev.Change]bool)
	g := NewGather(time.Now, func(_ time.Duration, what func()) { go what() }, func(changes []netdev.Change) {
		if !calls.TryLock() {
			t.Error("two calls at a time")
			return
		}
		defer calls.Unlock()
		look.Lock()
		defer look.Unlock()
		for _, c := range changes {
			seen[c] = true
		}
	})
	var wg sync.WaitGroup
	for i := range tellers {
		wg.Go(func() {
			for range each {
				g.Tell([]netdev.Change{{Cause: netdev.LinkChanged, Device: i}})
			}
		})
	}
	wg.Wait()
	for {
		look.Lock()
		n := len(seen)
		look.Unlock()
		if n == tellers {
			break
		}
		time.Sleep(time.Millisecond)
	}
	g.Close()
}
