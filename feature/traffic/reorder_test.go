package traffic_test

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/policy"
)

// Containers start, change and stop while packets wait. The kernel has the right classes when Apply
// returns, and no change loses a packet.
func TestChange(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, 20*mbit)
	h.start()
	x, y, to := h.two("bridge")
	z := sender{}
	z.box, z.c = h.add("three", "10.66.0.4/24", h.ns)
	all := []sender{x, y, z}
	got := h.take(h.wire)
	to += ":9000"
	for _, s := range all {
		h.resolve(s.box, h.wire, to)
	}
	weigh := func(i int, weight uint32) func() error {
		return func() error { return h.apply(all[i].c, policy.Net{Weight: weight}) }
	}
	const link, promised = 20 * mbit, 19 * mbit
	was, sent := got.Read(), uint64(0)
	for _, s := range []struct {
		name  string
		do    func() error
		rates []uint64 // of the default class, and of each container; 0: no class
		stops bool     // the third
	}{
		{"the first", weigh(0, 1), []uint64{promised / 2, promised / 2, 0, 0}, false},
		{"the second", weigh(1, 1), []uint64{promised / 3, promised / 3, promised / 3, 0}, false},
		{"the third", weigh(2, 1), []uint64{promised / 4, promised / 4, promised / 4, promised / 4}, false},
		{"another weight", weigh(1, 2), []uint64{promised / 5, promised / 5, promised / 5 * 2, promised / 5}, false},
		{"a rate", func() error { return h.apply(z.c, policy.Net{Rate: 7 * mbit}) }, []uint64{3 * mbit, 3 * mbit, 6 * mbit, 7 * mbit}, false},
		{"a weight in place of the rate", weigh(2, 1), []uint64{promised / 5, promised / 5, promised / 5 * 2, promised / 5}, false},
		{"one stops", func() error { return h.traffic.Remove(t.Context(), z.c.ID) }, []uint64{promised / 4, promised / 4, promised / 2, 0}, true},
		{"it starts again", weigh(2, 4), []uint64{promised / 8, promised / 8, promised / 4, promised / 2}, false},
	} {
		for i, c := range all {
			if s.stops && i == 2 {
				h.emptied(c.c) // a class that goes has 200 ms to send its queue, which a busy machine may exceed
				continue
			}
			h.sendSized(c.box, to, datagrams/2, 1400)
			sent += datagrams / 2
		}
		must(t, s.do())
		want := map[uint16]class{qdisc.MinorTop: {link, link, 0}, qdisc.MinorDefault: {s.rates[0] / 8 * 8, link, 0}}
		for i, rate := range s.rates[1:] {
			if rate > 0 {
				want[h.minor(all[i].c)] = class{rate / 8 * 8, link, 0}
			}
		}
		if is := h.classesOf(h.ns, "nic0"); !maps.Equal(is, want) {
			t.Errorf("%s: classes %v, want %v", s.name, is, want)
		}
	}
	testkit.Same(t, "packets were sent", sent, h.through(got, was, sent))
	for _, r := range h.traffic.Read().Rows {
		testkit.Same(t, fmt.Sprintf("packets that the class of %d has dropped", r.Container), uint64(0), r.Drops)
	}
}

// emptied waits until a container's class is empty.
func (h *host) emptied(c container.Container) {
	h.t.Helper()
	until(h.t, "the class of "+c.Name+" is empty", func() (string, bool) { n := h.stats(&c).Queued; return fmt.Sprint(n), n == 0 })
}

// The order of two containers changes while packets of one wait. HTB keeps that class in its old place
// until its queue is empty, so its packets go through a second class in the new place. No packet is
// lost, and the second class goes.
func TestPriorityChange(t *testing.T) {
	testkit.InFull(t)
	for _, mode := range []string{"bridge", "macvlan", "host"} {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, mbit)
			h.start()
			x, y, to := h.two(mode)
			got := h.take(h.wire)
			h.resolve(x.box, h.wire, to+":9000")
			was, waiting := got.Read(), uint64(0)
			steady := h.run(x.box, "udp-send", "--rate", "0", "--size", "100", "--to", to+":9000")
			order := func(first, second int) {
				t.Helper()
				must(t, h.apply(x.c, policy.Net{Rate: mbit / 10, Priority: &first}))
				must(t, h.apply(y.c, policy.Net{Rate: mbit / 10, Priority: &second}))
				all := h.classesOf(h.ns, "nic0")
				if a, b := all[h.minor(x.c)].prio, all[h.minor(y.c)].prio; a != uint32(first) || b != uint32(second) || len(all) != 4 {
					t.Errorf("classes %v, want the priorities %d and %d", all, first, second)
				}
			}
			order(1, 0)
			steady.SetRate(200)
			first := 1
			for end := time.Now().Add(time.Minute); ; {
				if h.stats(&x.c).Queued < 40 { // half a second of the link
					h.sendSized(x.box, to+":9000", 40, 1400)
					waiting += 40
				}
				first = 1 - first
				if h.beside(func() { order(first, 1-first) }) > 0 {
					break
				}
				if time.Now().After(end) {
					t.Fatal("nothing has been sent through a second class")
				}
			}
			steady.SetRate(0)
			lost := func() uint64 { return steady.Read().Since(load.Reading{}).Ops + waiting - got.Read().Since(was).Ops }
			until(t, "no packet is lost", func() (string, bool) { n := lost(); return fmt.Sprint(n), n == 0 })
			testkit.Same(t, "packets that its class has dropped", uint64(0), h.stats(&x.c).Drops)
		})
	}
}

// beside returns how many packets were sent by classes that exist at the uplink only while do runs.
func (h *host) beside(do func()) (packets uint64) {
	h.t.Helper()
	d, err := qdisc.Open(h.Open(h.ns), h.nic0)
	must(h.t, err)
	defer d.Close()
	known, err := d.Stats(qdisc.KindHTB)
	must(h.t, err)
	done, most := make(chan struct{}), make(chan uint64)
	go func() {
		var n uint64
		for {
			all, _ := d.Stats(qdisc.KindHTB)
			for minor, st := range all {
				if _, was := known[minor]; !was {
					n = max(n, st.Packets)
				}
			}
			select {
			case <-done:
				most <- n
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	do()
	close(done)
	return <-most
}
