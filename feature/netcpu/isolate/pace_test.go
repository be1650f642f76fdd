package isolate

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/tenant"
)

// What others than the isolated get is less when a charged container has ended. The threads of
// uplinks that rested may have run before, and a CPU counts where packets are worked for.
func TestWorkAfter(t *testing.T) {
	const ms = time.Millisecond
	one, two := container.Device{Index: 1}, container.Device{Index: 2}
	began := time.Now()
	last := work{
		at: began, ran: map[container.Device]time.Duration{one: 100 * ms}, others: 5000,
		heavy: map[container.Device]time.Time{one: began}, idle: map[int]time.Duration{0: 0, 1: 0},
	}
	now := work{
		at: began.Add(200 * ms), ran: map[container.Device]time.Duration{one: 160 * ms, two: time.Hour}, others: 7000,
		heavy: map[container.Device]time.Time{one: began}, idle: map[int]time.Duration{0: 0, 1: 150 * ms},
	}
	want := uplinkWindow{since: began, length: 200 * ms, ran: 60 * ms, idle: 150 * ms, heavy: true, others: 2000}
	if got := now.after(last, nil); got != want {
		t.Errorf("on any CPU: %+v, want %+v", got, want)
	}
	want.idle, want.busy = 0, true
	if got := now.after(last, []int{0}); got != want {
		t.Errorf("on CPU 0: %+v, want %+v", got, want)
	}
	now.others, now.idle = 4000, nil
	want = uplinkWindow{since: began, length: 200 * ms, ran: 60 * ms, idle: 200 * ms, heavy: true}
	if got := now.after(last, nil); got != want {
		t.Errorf("with idle time not known, and fewer packets: %+v, want %+v", got, want)
	}
}

// Only what comes by queues that others share is billed and held back. A container that may have no
// queue pays for none, whatever its packets have earned it.
func TestOwnQueues(t *testing.T) {
	var w paceWindow
	last := flow{alone: 50, Counters: drop.Counters{Arrived: 100, Held: 5}}
	if w.count(last, flow{alone: 950, Counters: drop.Counters{Arrived: 3100, Held: 105}}); w.alone != 900 || w.arrived != 2100 || w.passed != 2000 {
		t.Errorf("of 3000 packets with 900 by its own queue: %+v", w)
	}
	s, is := &isolation{drops: &drop.Drops{}}, New(Config{})
	is.isolated[tenant.Key{}] = s
	for _, s.queues = range []bool{false, true} {
		if got := is.owner(s.drops.Slot) == s; got != s.queues || is.owner(nobody) != nil {
			t.Errorf("it may have queues %t: it pays for one %t", s.queues, got)
		}
	}
}

// Bulk TCP comes in super-packets, requests do not, however long the uplinks work for them.
func TestBulk(t *testing.T) {
	u := uplinkWindow{length: time.Second}
	for _, c := range []struct {
		name string
		w    paceWindow
		want bool
	}{
		{"ten flows", paceWindow{uplinks: time.Second / 2, single: 200, super: 8000}, true},
		{"slow ones", paceWindow{uplinks: time.Second / 6, single: 200, super: 3000}, false},
		{"requests", paceWindow{uplinks: time.Second / 2, single: 30_000, super: 20}, false},
		{"nothing", paceWindow{}, false},
	} {
		if got := u.bulk(c.w); got != c.want {
			t.Errorf("%s: %t, want %t", c.name, got, c.want)
		}
	}
}

// The CPUs of the uplinks that work count, and one that may use any has all of them.
func TestUplinkCPUs(t *testing.T) {
	steered, any, quiet := container.Device{Index: 1}, container.Device{Index: 2}, container.Device{Index: 3}
	is := New(Config{})
	is.host = &uplinks{devices: map[container.Device]*uplinkDevice{steered: {at: place{cpus: []int{0}}}, any: {}, quiet: {at: place{cpus: []int{1}}}}}
	for _, c := range []struct {
		heavy []container.Device
		want  []int
	}{
		{nil, nil}, {[]container.Device{steered}, []int{0}}, {[]container.Device{any}, nil}, {[]container.Device{steered, any}, nil},
	} {
		is.worked.heavy = make(map[container.Device]time.Time)
		for _, key := range c.heavy {
			is.worked.heavy[key] = time.Now()
		}
		if got := is.cpus(); !slices.Equal(got, c.want) {
			t.Errorf("with %v: CPUs %v, want %v", c.heavy, got, c.want)
		}
	}
}

func TestPaceControl(t *testing.T) {
	const ms = time.Millisecond
	flood := paceWindow{length: 200 * ms, arrived: 26_000, passed: 20_000, own: 40 * ms, uplinks: 90 * ms, due: 100 * ms, busy: true, much: true}
	with := func(change func(*paceWindow)) paceWindow {
		w := flood
		change(&w)
		return w
	}
	for _, c := range []struct {
		name   string
		before float64
		w      paceWindow
		want   float64
	}{
		{"of the 130 ms that it takes 100 are due to it", 0, flood, 100_000 * 100 / 130.0},
		{"its own work leaves the uplinks a quarter", 0, with(func(w *paceWindow) { w.own = 100 * ms }), 100_000 * (100 + 25) / 190},
		{"a few pass in any case", 0, with(func(w *paceWindow) { w.passed = 100 }), law.Rate},
		{"nothing is limited any more", 50_000, with(func(w *paceWindow) { w.due = 0 }), 55_000},
		{"nothing is known", 50_000, with(func(w *paceWindow) { w.own = 0 }), 0},
		{"not much", 0, with(func(w *paceWindow) { w.much = false }), 0},
		{"because of the pace", 50_000, with(func(w *paceWindow) { w.much, w.passed = false, 10_000 }), 50_000 * 100 / 130.0},
		{"no flood any more", 50_000, with(func(w *paceWindow) { w.much, w.busy, w.arrived = false, false, 9_000 }), 0},
		{"nobody goes short", 0, with(func(w *paceWindow) { w.busy = false }), 0},
		{"nobody goes short any more", 50_000, with(func(w *paceWindow) { w.busy = false }), 55_000},
		{"some time is left", 50_000, with(func(w *paceWindow) { w.uplinks = 55 * ms }), 50_000 * 100 / 95.0},
		{"much is", 50_000, with(func(w *paceWindow) { w.uplinks = 10 * ms }), 55_000},
		{"all that arrive may pass", 120_000, with(func(w *paceWindow) { w.busy = false }), 0},
		{"no time", 50_000, paceWindow{}, 0},
	} {
		p := paceControl{rate: c.before}
		if got := p.next(c.w); math.Abs(got-c.want) > 1 || p.rate != got {
			t.Errorf("%s: %.0f packets/s, want %.0f", c.name, got, c.want)
		}
	}
}

// Whatever comes in, packets that are dropped cost their receiver less than ones that pass.
func TestDropsAreCheap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string, most uint64) uint64 { return rapid.Uint64Range(0, most).Draw(t, name) }
		u := uplinkWindow{length: time.Second, ran: time.Second / 2}
		arrived, others := draw("arrived", 1<<20), draw("others", 1<<20)
		passed, othersPassed := draw("passed", arrived), draw("others passed", others)
		bill := func(passed uint64) time.Duration {
			var s isolation
			s.paced(paceWindow{arrived: arrived, passed: passed}, paceWindow{arrived: arrived + others, passed: passed + othersPassed}, u, 0)
			return s.took
		}
		if all, some := bill(arrived), bill(passed); some > all || some < 0 || all > u.ran {
			t.Errorf("a bill of %v, and of %v with %d of %d packets dropped", all, some, arrived-passed, arrived)
		}
	})
}
