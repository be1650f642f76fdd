package account

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/irq"
)

// watching is a host whose counters the test increases, looked at each second.
type watching struct {
	watch
	at     time.Time
	counts counts
	works  map[int]irq.Work
}

func newWatching() *watching {
	w := &watching{at: time.Unix(1000, 0), counts: make(counts), works: map[int]irq.Work{0: {}, 1: {}}}
	w.second(nil, nil)
	return w
}

// second is one second with packets of containers, and with the time of softirqs of CPUs.
func (w *watching) second(packets map[container.ID]uint64, softirqs map[int]time.Duration) {
	w.at = w.at.Add(time.Second)
	next := make(counts)
	for id, c := range w.counts {
		next[id] = c
	}
	for id, n := range packets {
		next[id] = count{next[id].in + n, 0}
	}
	w.counts = next
	works := make(map[int]irq.Work)
	for cpu, work := range w.works {
		work.Time += softirqs[cpu]
		works[cpu] = work
	}
	w.works = works
	w.look(w.at, next, works)
}

// windows counts the windows of n seconds.
func (w *watching) windows(n int, packets map[container.ID]uint64, softirqs map[int]time.Duration) (opened int) {
	for range n {
		w.second(packets, softirqs)
		if w.opens(w.at) {
			opened++
			w.rest(w.at)
		}
	}
	return opened
}

// While nothing changes, windows get rare. A change opens a window at once, and so does a change back.
func TestWatchChanges(t *testing.T) {
	w := newWatching()
	w.counts[1], w.counts[2] = count{}, count{}
	usual := map[container.ID]uint64{1: 10_000, 2: 300}
	w.windows(30, usual, nil)
	if n := w.windows(100, usual, nil); n < 8 || n > 13 {
		t.Errorf("%d windows in 100 s without a change", n)
	}
	for _, c := range []struct {
		name     string
		packets  map[container.ID]uint64
		softirqs map[int]time.Duration
		opens    bool
	}{
		{"more", map[container.ID]uint64{1: 25_000, 2: 300}, nil, true},
		{"a little more", map[container.ID]uint64{1: 15_000, 2: 300}, nil, false},
		{"less", map[container.ID]uint64{1: 4_000, 2: 300}, nil, true},
		{"a small container", map[container.ID]uint64{1: 10_000, 2: 1_000}, nil, true},
		{"a small container, a little", map[container.ID]uint64{1: 10_000, 2: 700}, nil, false},
		{"softirqs on a busy CPU", usual, map[int]time.Duration{1: 20 * time.Millisecond}, true},
		{"one tick", usual, map[int]time.Duration{1: 10 * time.Millisecond}, false},
	} {
		w.windows(30, usual, nil)
		w.rest(w.at)
		w.due = w.at.Add(time.Hour)
		if n := w.windows(1, c.packets, c.softirqs); (n > 0) != c.opens {
			t.Errorf("%s: %d windows, want one: %v", c.name, n, c.opens)
		}
	}
}

// If a mode may act on a change, half a second shows the change, but a tick of the kernel's clock is no
// change. The next window comes soon, because a victim that runs by turns may miss the first.
func TestWatchHurried(t *testing.T) {
	for _, c := range []struct {
		name    string
		packets uint64 // in a quarter of a second, besides 2,500
		work    irq.Work
		opens   bool
	}{
		{"a flood", 20_000, irq.Work{}, true},
		{"softirqs", 0, irq.Work{Time: 60 * time.Millisecond}, true},
		{"a victim", 0, irq.Work{Idle: -250 * time.Millisecond}, true},
		{"one tick", 0, irq.Work{Time: 10 * time.Millisecond, Idle: -10 * time.Millisecond}, false},
	} {
		w := &watch{hurried: true, pause: lastPause}
		at, packets, work := time.Unix(1000, 0), uint64(0), irq.Work{}
		quarter := func(more uint64, by irq.Work) bool {
			at, packets = at.Add(w.tick()), packets+2500+more
			work = irq.Work{Time: work.Time + by.Time, Idle: work.Idle + by.Idle + 250*time.Millisecond, Network: work.Network + 1000}
			w.look(at, counts{1: count{in: packets}}, map[int]irq.Work{0: work})
			return w.opens(at)
		}
		for range 40 {
			quarter(0, irq.Work{})
		}
		w.rest(at)
		w.due = at.Add(time.Hour)
		opened := quarter(c.packets, c.work) || c.name != "one tick" && quarter(c.packets, c.work)
		if w.rest(at); opened != c.opens || opened && w.pause != firstPause {
			t.Errorf("%s: opens %v, then rests for %v", c.name, opened, w.pause)
		}
	}
}

// Traffic that changes all the time opens few more windows than the pauses do.
func TestWatchUnrest(t *testing.T) {
	w := newWatching()
	w.counts[1] = count{}
	n := 0
	for range 100 {
		n += w.windows(1, map[container.ID]uint64{1: 10_000}, nil)
		n += w.windows(1, map[container.ID]uint64{1: 1_000}, nil)
	}
	if n < 30 || n > 60 {
		t.Errorf("%d windows in 200 s of changes", n)
	}
}

// A new container does not wait for the end of a pause.
func TestWatchSoon(t *testing.T) {
	w := newWatching()
	w.due = w.at.Add(lastPause)
	w.soon(w.at)
	if n := w.windows(2, nil, nil); n != 1 {
		t.Errorf("%d windows within two seconds, want 1", n)
	}
}

func TestWatchLength(t *testing.T) {
	for _, c := range []struct {
		rate float64
		want time.Duration
	}{
		{0, longest}, {budget / 2, longest}, {10 * budget, 100 * time.Millisecond}, {1e6, shortest},
	} {
		w := watch{rate: c.rate}
		if got := w.length(); got != c.want {
			t.Errorf("a window of %v with %v packets/s, want %v", got, c.rate, c.want)
		}
	}
}

// Packets may rob a task that begins to run on their CPU, although the packets have not changed. Without
// packets a new task opens no window.
func TestWatchTasks(t *testing.T) {
	for _, c := range []struct {
		softirqs uint64
		idle     time.Duration
		opens    bool
	}{
		{2000, 400 * time.Millisecond, true},
		{2000, 900 * time.Millisecond, false},
		{20, 400 * time.Millisecond, false},
	} {
		w := newWatching()
		second := func(idle time.Duration) {
			was := w.works[0]
			w.works = map[int]irq.Work{0: {Network: was.Network + c.softirqs, Idle: was.Idle + idle}} // look has the old one
			w.second(nil, nil)
		}
		for range 5 {
			second(time.Second)
		}
		w.rest(w.at)
		w.due = w.at.Add(time.Hour)
		second(c.idle)
		if got := w.opens(w.at); got != c.opens {
			t.Errorf("%d softirqs, %v idle after a second: opens %v", c.softirqs, c.idle, got)
		}
	}
}
