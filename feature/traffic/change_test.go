package traffic_test

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// sample is what the classes of some containers had sent by a time.
type sample struct {
	at   time.Time
	sent []uint64
}

// sample reads the classes of all senders at once.
func (h *host) sample(senders []sender) sample {
	h.t.Helper()
	s := sample{at: time.Now()}
	for i := range senders {
		s.sent = append(s.sent, h.stats(&senders[i].c).Bytes)
	}
	return s
}

// share gives the part of sender i of what all have sent between two samples.
func share(a, b sample, i int) float64 {
	var all, own uint64
	for j := range a.sent {
		n := b.sent[j] - a.sent[j]
		all += n
		if j == i {
			own = n
		}
	}
	return float64(own) / math.Max(float64(all), 1)
}

// needBulk skips a test on a machine where a link is not full of TCP whatever
// the others do: where it is the CPU that is shared.
func (h *host) needBulk(s sender, to string, link float64) {
	h.t.Helper()
	if _, _, rate := h.unshaped(s.box, h.wire, to); rate < 10*link {
		testkit.Skip(h.t, "machine is too slow for bulk TCP")
	}
}

// step is one change while containers send, what takes it back, and the shares
// that are due between the two.
type step struct {
	name     string
	do, undo func()
	due      []float64
}

// TestChangeUnderLoad has containers start, change and stop while all send what
// they can, and looks at when the new shares are on the wire. The test bounds
// what comes 100 ms later against what comes in the end of the same run.
func TestChangeUnderLoad(t *testing.T) {
	h := newHost(t, 300*mbit)
	h.start()
	x, y, to := h.two("bridge")
	z := sender{}
	z.box, z.c = h.add("three", "10.66.0.4/24", h.ns)
	h.needBulk(x, to, 300*mbit)
	all := []sender{x, y, z}
	weigh := func(i int, weight uint32) func() {
		return func() { must(t, h.apply(all[i].c, policy.Net{Weight: weight})) }
	}
	for i, s := range all {
		weigh(i, 1)()
		h.run(h.wire, "tcp-recv", "--listen", port(":", i))
		h.run(s.box, append(tcp(2), "--to", port(to+":", i))...)
	}
	time.Sleep(time.Second)
	rate := func() { must(t, h.apply(z.c, policy.Net{Rate: 150 * mbit, Ceil: 150 * mbit})) }
	stop := func() { must(t, h.traffic.Remove(t.Context(), z.c.ID)) }
	for _, s := range []step{
		{"another weight", weigh(1, 2), weigh(1, 1), []float64{0.25, 0.5, 0.25}},
		{"a rate", rate, weigh(2, 1), []float64{1. / 6, 1. / 3, 0.5}},
		{"one stops", stop, rate, []float64{1. / 3, 2. / 3, 0}},
		{"one starts", weigh(2, 3), stop, []float64{1. / 6, 1. / 3, 0.5}},
	} {
		t.Run(s.name, func(t *testing.T) {
			for range 3 { // where others keep a CPU from a sender for a while
				early, late := h.changes(t, all, s)
				if early <= late+0.1 && late <= 0.25 {
					return
				}
				s.undo()
				time.Sleep(time.Second)
				t.Logf("100 ms after the change shares are off by %.1f %%, in the end by %.1f %%", 100*early, 100*late)
			}
			t.Error("the shares are not those that are due, or late, again and again")
			s.do()
		})
	}
}

// changes makes one step, and gives by how much shares are off soon afterwards,
// and in the end.
func (h *host) changes(t *testing.T, all []sender, s step) (early, late float64) {
	start := time.Now()
	s.do()
	done := time.Now()
	// A class that has gone has no counters: of the others alone.
	there := all
	if s.due[len(s.due)-1] == 0 {
		there = all[:len(all)-1]
	}
	var samples []sample
	for time.Since(done) < 1500*time.Millisecond {
		samples = append(samples, h.sample(there))
		time.Sleep(5 * time.Millisecond)
	}
	after := func(d time.Duration) int {
		for i, s := range samples {
			if s.at.Sub(done) >= d {
				return i
			}
		}
		return len(samples) - 1
	}
	off := func(from, to int) (worst float64) {
		var due float64
		for i := range there {
			due += s.due[i]
		}
		for i := range there {
			worst = math.Max(worst, math.Abs(share(samples[from], samples[to], i)/(s.due[i]/due)-1))
		}
		return worst
	}
	const window = 100 * time.Millisecond
	settled := time.Duration(-1)
	for i := range samples {
		if end := after(samples[i].at.Sub(done) + window); end < len(samples)-1 && off(i, end) <= 0.03 {
			settled = samples[i].at.Sub(done)
			break
		}
	}
	early = off(after(100*time.Millisecond), after(600*time.Millisecond))
	late = off(after(time.Second), len(samples)-1)
	t.Logf("applied in %.1f ms; within 3 %% (over %v) from %v on; off by %.1f %% from 100 to 600 ms after, %.1f %% in the end",
		done.Sub(start).Seconds()*1e3, window, settled, 100*early, 100*late)
	return early, late
}

func port(to string, i int) string { return to + string(rune('1'+i)) + "000" }

// TestPriorityUnderLoad changes the order of two containers that never stop
// sending: it counts nevertheless, and back again.
func TestPriorityUnderLoad(t *testing.T) {
	for _, mode := range []string{"bridge", "macvlan", "host"} {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, 300*mbit)
			h.start()
			x, y, to := h.two(mode)
			h.needBulk(x, to, 300*mbit)
			both := []sender{x, y}
			order := func(first, second int) {
				must(t, h.apply(x.c, policy.Net{Rate: 30 * mbit, Priority: &first}))
				must(t, h.apply(y.c, policy.Net{Rate: 30 * mbit, Priority: &second}))
			}
			order(1, 0)
			for i, s := range both {
				h.run(h.wire, "tcp-recv", "--listen", port(":", i))
				h.run(s.box, append(tcp(2), "--to", port(to+":", i))...)
			}
			var got []float64
			for _, first := range []int{1, 0, 1} {
				start := time.Now()
				order(first, 1-first)
				took := time.Since(start)
				time.Sleep(300 * time.Millisecond)
				has := 0.0
				for range 4 { // where others keep a CPU from a sender for a while
					a := h.sample(both)
					time.Sleep(700 * time.Millisecond)
					has = share(a, h.sample(both), 1)
					t.Logf("priority %d and %d: the second has %.2f; applied in %v", first, 1-first, has, took)
					if first == 1 && has >= 0.7 || first == 0 && has <= 0.3 {
						break
					}
				}
				got = append(got, has)
			}
			if got[0] < 0.7 || got[1] > 0.3 || got[2] < 0.7 {
				t.Errorf("first in order, last, and first again, it has %.2f of the link", got)
			}
			if n := len(h.classes()); n != 4 {
				t.Errorf("%d classes are left", n)
			}
		})
	}
}
