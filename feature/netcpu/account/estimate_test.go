package account

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// seen is a window of one second in which the packets of one container cost 1 µs each, half of it
// in the time of container 9.
func seen(id container.ID, packets, counted uint64) window {
	cpu := time.Duration(packets) * time.Microsecond
	a := Account{Took: cpu / 2, Own: cpu / 2}
	a.Receive[UDP] = Work{CPU: cpu, Packets: packets, Bytes: 100 * packets}
	w := window{length: time.Second, seen: Reading{
		Softirq: cpu, Accounts: map[container.ID]Account{id: a}, ByCPU: map[container.ID][]time.Duration{id: {0, cpu}},
		Thefts: map[Pair]time.Duration{{Party{9, Task}, id}: cpu / 2},
	}}
	if counted > 0 {
		w.counts = counts{id: {in: counted}}
	}
	return w
}

// with returns the window with another account of a container.
func (w window) with(id container.ID, change func(*Account)) window {
	a := w.seen.Accounts[id]
	change(&a)
	w.seen.Accounts[id] = a
	return w
}

// estimated is a reading of nothing, with the estimate.
func estimated(e *estimate, ids ...container.ID) (Reading, map[container.ID]Account) {
	r := Reading{Accounts: make(map[container.ID]Account), ByCPU: make(map[container.ID][]time.Duration), Thefts: make(map[Pair]time.Duration)}
	for _, id := range ids {
		r.Accounts[id], r.ByCPU[id] = Account{}, make([]time.Duration, 2)
	}
	e.addTo(&r)
	return r, r.Accounts
}

// The cost of a gap is the price of a packet in the window, times the packets that the kernel has counted.
func TestEstimate(t *testing.T) {
	var e estimate
	e.gap(counts{1: {in: 500}}, time.Second, 0) // due until a price is known
	if _, by := estimated(&e, 1); by[1].CPU() != 0 {
		t.Errorf("%v without a price", by[1].CPU())
	}
	e.see(seen(1, 2000, 2000))
	e.gap(counts{1: {in: 4500}}, time.Second, 0)
	r, by := estimated(&e, 1, 9)
	const want = 5000 * time.Microsecond
	a := by[1]
	if a.CPU() != want || a.Receive[UDP].Packets != 5000 || a.Receive[UDP].Bytes != 500000 || a.Took != want/2 || a.Own != want/2 {
		t.Errorf("estimated %+v, want 5000 packets of 1 µs and 100 bytes, half of it taken", a)
	}
	if r.Softirq != want || r.ByCPU[1][1] != want || by[9].Robbed != want/2 {
		t.Errorf("softirq %v, on CPU 1 %v, robbed %v: want %v, %v, %v", r.Softirq, r.ByCPU[1][1], by[9].Robbed, want, want, want/2)
	}
	if of := (Pair{Party{9, Task}, 1}); len(r.Thefts) != 1 || r.Thefts[of] != want/2 || !of.Loss() {
		t.Errorf("thefts %+v, want one of %v", r.Thefts, want/2)
	}
	if gone := e.forget(1); gone != want {
		t.Errorf("forgot %v, want %v", gone, want)
	}
	if _, by := estimated(&e, 1); by[1].CPU() != 0 {
		t.Errorf("%v after forget", by[1].CPU())
	}
}

// Whatever the length of a window, gaps have as many packets as the kernel has counted in them, also
// of a protocol that has less than one in each.
func TestEstimateCountsExactly(t *testing.T) {
	for length := shortest; length < 2*shortest; length += shortest/97 + 1 {
		var e estimate
		w := seen(1, 200, 250)
		w.length = length
		e.see(w.with(1, func(a *Account) { a.Receive[TCP] = Work{CPU: time.Microsecond, Packets: 50, Bytes: 5000} }))
		for range 50 {
			e.gap(counts{1: {in: 3}}, time.Second, 0)
		}
		_, by := estimated(&e, 1)
		if udp, tcp := by[1].Receive[UDP], by[1].Receive[TCP]; udp.Packets != 120 || udp.Bytes != 12000 || tcp.Packets != 30 || tcp.Bytes != 3000 {
			t.Errorf("after a window of %v: UDP %+v, TCP %+v; want 120 and 30 packets of 100 bytes", length, udp, tcp)
		}
	}
}

// Kernel and programs count a super-packet from GRO differently, which the estimate corrects. If the
// kernel counts no packets of a container, or far too few, the estimate uses the time.
func TestEstimateCounted(t *testing.T) {
	for _, c := range []struct {
		counted, gap uint64 // of 2000 packets in a window of a second, and in the gap
		length       time.Duration
		packets      uint64
	}{{20000, 10000, time.Second, 1000}, {0, 1, 3 * time.Second, 6000}, {10, 1, 3 * time.Second, 6000}} {
		var e estimate
		e.see(seen(1, 2000, c.counted))
		e.gap(counts{1: {in: c.gap}}, c.length, 0)
		if _, by := estimated(&e, 1); by[1].Receive[UDP].Packets != c.packets || by[1].CPU() != time.Duration(c.packets)*time.Microsecond {
			t.Errorf("%+v: estimated %+v, want so many packets of 1 µs", c, by[1])
		}
	}
}

// The price stays while no packet comes. A very different price replaces that of earlier windows at once.
// A similar price is averaged with it.
func TestEstimatePrice(t *testing.T) {
	var e estimate
	e.see(seen(1, 10, 10))
	for range 1000 {
		w := seen(1, 0, 0)
		w.counts = counts{1: {}}
		e.see(w)
	}
	var was time.Duration
	costs := func(what string, each time.Duration) {
		t.Helper()
		e.gap(counts{1: {in: 1000}}, time.Second, 0)
		_, by := estimated(&e, 1)
		if cost := by[1].CPU() - was; cost < 995*each || cost > 1005*each {
			t.Errorf("1000 packets cost %v %s, want %v each", cost, what, each)
		}
		was = by[1].CPU()
	}
	dearer := func(by time.Duration) window {
		return seen(1, 1000, 1000).with(1, func(a *Account) { a.Receive[UDP].CPU *= by })
	}
	costs("after quiet windows", time.Microsecond)
	e.see(dearer(1))
	e.see(dearer(2))
	costs("when they got dearer", 2*time.Microsecond)
	e.see(dearer(3))
	costs("as windows differ", 2556) // ns: 2 µs count for four fifths
}

// The time of softirqs with packets is measured between windows. The programs' time in the price of a packet
// is the same for cheap and dear packets. Interrupts before softirqs, and threads, have no share in it.
func TestEstimateMeasured(t *testing.T) {
	for _, c := range []struct {
		name string
		dear time.Duration // a packet of container 2, for one of 1 µs of container 1
		part float64       // of the windows in softirqs of packets
		took time.Duration // by 1000 packets of each
		want [2]time.Duration
	}{
		{"not measured", 10, 1, 0, [2]time.Duration{1000, 10000}},
		{"half a µs is the programs'", 10, 1, 10000, [2]time.Duration{500, 9500}},
		{"nothing is", 10, 1, 11000, [2]time.Duration{1000, 10000}},
		{"half of the work is in softirqs of packets", 3, 0.5, 1000, [2]time.Duration{500, 2500}},
		{"a slower machine", 3, 1, 5000, [2]time.Duration{1500, 3500}},
		{"nothing was seen of it", 1, 1, 1, [2]time.Duration{500, 500}},
	} {
		var e estimate
		w, other := seen(1, 1000, 1000), seen(2, 1000, 1000)
		w.seen.Accounts[2] = other.with(2, func(a *Account) { a.Receive[UDP].CPU *= c.dear }).seen.Accounts[2]
		w.seen.Softirq += c.dear * time.Millisecond
		w.counts[2], w.whole = other.counts[2], scaled(w.seen.Softirq, c.part)
		e.see(w)
		costs := func(n counts, took time.Duration, what string) {
			t.Helper()
			_, was := estimated(&e, 1, 2)
			e.gap(n, time.Second, took)
			_, by := estimated(&e, 1, 2)
			for i, want := range c.want {
				id := container.ID(1 + i)
				if cost := by[id].CPU() - was[id].CPU(); cost.Round(time.Microsecond) != want*time.Microsecond {
					t.Errorf("%s, %s: 1000 packets of container %d take %v, want %v", c.name, what, id, cost, want*time.Microsecond)
				}
			}
		}
		costs(counts{1: {in: 1000}, 2: {in: 1000}}, c.took*time.Microsecond, "measured")
		costs(counts{1: {in: 1000}, 2: {in: 1000}, 3: {in: few}}, time.Second, "beside packets whose price nobody knows")
		costs(counts{1: {in: 1000}, 2: {in: 1000}, 3: {in: 0}}, 0, "not measured")
	}
}

// If the kernel counts no packets, time without work in windows costs nothing later.
func TestEstimateIdle(t *testing.T) {
	var e estimate
	for range 10 {
		e.see(seen(1, 0, 0))
		e.gap(nil, time.Hour, 0)
	}
	e.see(seen(1, 2000, 0))
	e.gap(nil, 3*time.Second, 0)
	if _, by := estimated(&e, 1); by[1].CPU() != 6*time.Millisecond {
		t.Errorf("estimated %v, want 6ms", by[1].CPU())
	}
}

// A long phase does not outweigh the windows after it.
func TestEstimateAfterLongPhase(t *testing.T) {
	var e estimate
	phase := func(length, cpu time.Duration) {
		w := seen(1, 0, 0).with(1, func(a *Account) { a.Send[Other].CPU = cpu })
		w.length = length
		e.see(w)
	}
	phase(10*time.Second, time.Microsecond) // next to nothing
	for range 4 {
		phase(shortest, time.Millisecond)
	}
	e.gap(nil, time.Second, 0)
	want := time.Duration(time.Second/shortest) * time.Millisecond
	if _, by := estimated(&e, 1); by[1].CPU() < want*3/4 || by[1].CPU() > want {
		t.Errorf("%v in a second, want about %v", by[1].CPU(), want)
	}
}

// robbery finds a culprit that takes more than the given part of a CPU. Time that is no loss does not count.
func TestRobbery(t *testing.T) {
	for _, c := range []struct {
		length time.Duration
		thefts map[Pair]time.Duration
		want   float64
	}{
		{time.Second, nil, 0},
		{time.Second, map[Pair]time.Duration{{Party{9, Task}, 1}: 20 * time.Millisecond, {Party{9, Task}, 2}: 10 * time.Millisecond, {Party{8, Task}, 1}: 5 * time.Millisecond}, 0.025},
		{time.Second, map[Pair]time.Duration{{Party{9, Idle}, 1}: time.Second, {Party{9, Peer}, 1}: time.Second, {Party{9, Ksoftirqd}, 1}: time.Second}, 0},
		{time.Millisecond, map[Pair]time.Duration{{Party{9, Task}, 1}: shortest / 1000}, 0.001}, // a short window shows little
	} {
		w := window{length: c.length, seen: Reading{Thefts: c.thefts}}
		if got := w.robbery(); got != c.want {
			t.Errorf("%v in %v: robbery of %v CPUs, want %v", c.thefts, c.length, got, c.want)
		}
	}
}
