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
	a := Account{Container: id, Took: cpu / 2, Own: cpu / 2}
	a.Receive[UDP] = Work{CPU: cpu, Packets: packets, Bytes: 100 * packets}
	w := window{length: time.Second, seen: Reading{
		Softirq: cpu, Accounts: []Account{a}, ByCPU: map[container.ID][]time.Duration{id: {0, cpu}},
		Thefts: []Theft{{Victim: Party{Container: 9, Kind: Task}, Culprit: id, CPU: cpu / 2}},
	}}
	if counted > 0 {
		w.counts = counts{id: {in: counted}}
	}
	return w
}

// estimated is a reading of nothing, with the estimate.
func estimated(e *estimate, ids ...container.ID) (Reading, map[container.ID]Account) {
	r := Reading{ByCPU: make(map[container.ID][]time.Duration)}
	for _, id := range ids {
		r.Accounts = append(r.Accounts, Account{Container: id})
		r.ByCPU[id] = make([]time.Duration, 2)
	}
	e.addTo(&r, true)
	by := make(map[container.ID]Account)
	for _, a := range r.Accounts {
		by[a.Container] = a
	}
	return r, by
}

// A gap costs what the window's packets cost, times the packets that the kernel has counted in it.
func TestEstimate(t *testing.T) {
	var e estimate
	e.gap(counts{1: {in: 500}}, time.Second) // due until a price is known
	if _, by := estimated(&e, 1); by[1].CPU() != 0 {
		t.Errorf("%v without a price", by[1].CPU())
	}
	e.see(seen(1, 2000, 2000))
	e.gap(counts{1: {in: 4500}}, time.Second)
	r, by := estimated(&e, 1, 9)
	const want = 5000 * time.Microsecond
	a := by[1]
	if a.CPU() != want || a.Receive[UDP].Packets != 5000 || a.Receive[UDP].Bytes != 500000 || a.Took != want/2 || a.Own != want/2 {
		t.Errorf("estimated %+v, want 5000 packets of 1 µs and 100 bytes, half of it taken", a)
	}
	if r.Softirq != want || r.ByCPU[1][1] != want || by[9].Robbed != want/2 {
		t.Errorf("softirq %v, on CPU 1 %v, robbed %v: want %v, %v, %v", r.Softirq, r.ByCPU[1][1], by[9].Robbed, want, want, want/2)
	}
	if len(r.Thefts) != 1 || r.Thefts[0].CPU != want/2 || !r.Thefts[0].Loss() {
		t.Errorf("thefts %+v, want one of %v", r.Thefts, want/2)
	}
	if gone := e.forget(1); gone != want {
		t.Errorf("forgot %v, want %v", gone, want)
	}
	if _, by := estimated(&e, 1); by[1].CPU() != 0 {
		t.Errorf("%v after forget", by[1].CPU())
	}
}

// A super-packet that GRO has made counts as the kernel and as the programs see it.
func TestEstimateMergedPackets(t *testing.T) {
	var e estimate
	e.see(seen(1, 2000, 20000))
	e.gap(counts{1: {in: 10000}}, time.Second)
	if _, by := estimated(&e, 1); by[1].Receive[UDP].Packets != 1000 || by[1].CPU() != time.Millisecond {
		t.Errorf("estimated %+v, want 1000 packets of 1 µs", by[1])
	}
}

// Where the kernel counts no packets of a container, or much fewer than come, the time counts.
func TestEstimateUncounted(t *testing.T) {
	for _, counted := range []uint64{0, 10} {
		var e estimate
		e.see(seen(1, 2000, counted))
		e.gap(counts{1: {in: 1}}, 3*time.Second)
		if _, by := estimated(&e, 1); by[1].CPU() != 6*time.Millisecond {
			t.Errorf("%d counted: estimated %v, want 6ms", counted, by[1].CPU())
		}
	}
}

// The price stays while no packet comes; a busy window replaces what earlier ones have shown.
func TestEstimatePrice(t *testing.T) {
	var e estimate
	e.see(seen(1, 10, 10))
	for range 1000 {
		w := seen(1, 0, 0)
		w.counts = counts{1: {}}
		e.see(w)
	}
	e.gap(counts{1: {in: 1000}}, time.Second)
	_, by := estimated(&e, 1)
	if by[1].CPU() != time.Millisecond {
		t.Errorf("estimated %v after quiet windows, want 1ms", by[1].CPU())
	}
	w := seen(1, enough, enough)
	w.own = 500 // half of their time is the programs' own
	e.see(w)
	e.gap(counts{1: {in: 1000}}, time.Second)
	if _, after := estimated(&e, 1); after[1].CPU()-by[1].CPU() != 500*time.Microsecond {
		t.Errorf("estimated %v for 1000 packets of 500 ns", after[1].CPU()-by[1].CPU())
	}
}

// Where the kernel counts nothing, the time in which windows have shown no work costs nothing later.
func TestEstimateIdle(t *testing.T) {
	var e estimate
	for range 10 {
		e.see(seen(1, 0, 0))
		e.gap(nil, time.Hour)
	}
	e.see(seen(1, 2000, 0))
	e.gap(nil, 3*time.Second)
	if _, by := estimated(&e, 1); by[1].CPU() != 6*time.Millisecond {
		t.Errorf("estimated %v, want 6ms", by[1].CPU())
	}
}

// One packet in each window costs what one does, not what those of all windows do.
func TestEstimateFewPackets(t *testing.T) {
	var e estimate
	for range 100 {
		e.see(seen(1, 1, 1))
	}
	e.gap(counts{1: {in: 1000}}, time.Second)
	_, by := estimated(&e, 1)
	if cpu := by[1].CPU(); cpu < 990*time.Microsecond || cpu > 1010*time.Microsecond {
		t.Errorf("estimated %v for 1000 packets of 1 µs", cpu)
	}
}

// What a long phase has seen does not outweigh the windows after it.
func TestEstimateAfterLongPhase(t *testing.T) {
	var e estimate
	long := seen(1, 0, 0)
	long.length = 10 * time.Second // in which it did next to nothing
	long.seen.Accounts[0].Send[Other].CPU = time.Microsecond
	e.see(long)
	for range 4 {
		short := seen(1, 0, 0)
		short.length = shortest
		short.seen.Accounts[0].Send[Other].CPU = time.Millisecond
		e.see(short)
	}
	e.gap(nil, time.Second)
	want := time.Duration(time.Second/shortest) * time.Millisecond
	if _, by := estimated(&e, 1); by[1].CPU() < want*3/4 || by[1].CPU() > want {
		t.Errorf("%v in a second, want about %v", by[1].CPU(), want)
	}
}

// A culprit that takes more than the given part of a CPU is found; time that nobody lost does not count.
func TestRobbery(t *testing.T) {
	theft := func(culprit container.ID, kind PartyKind, cpu time.Duration) Theft {
		return Theft{Victim: Party{Container: 9, Kind: kind}, Culprit: culprit, CPU: cpu}
	}
	for _, c := range []struct {
		length time.Duration
		thefts []Theft
		want   float64
	}{
		{time.Second, nil, 0},
		{time.Second, []Theft{theft(1, Task, 20*time.Millisecond), theft(2, Task, 10*time.Millisecond), theft(1, Task, 5*time.Millisecond)}, 0.025},
		{time.Second, []Theft{theft(1, Idle, time.Second), theft(1, Peer, time.Second), theft(1, Ksoftirqd, time.Second)}, 0},
		{time.Millisecond, []Theft{theft(1, Task, shortest/1000)}, 0.001}, // a short window shows little
	} {
		w := window{length: c.length, seen: Reading{Thefts: c.thefts}}
		if got := w.robbery(); got != c.want {
			t.Errorf("%v in %v: robbery of %v CPUs, want %v", c.thefts, c.length, got, c.want)
		}
	}
}
