package traffic_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// shaper is the kind of qdisc that this kernel keeps a latency with.
func shaper() qdisc.Kind {
	if qdisc.Supported(qdisc.KindHFSC) == nil {
		return qdisc.KindHFSC
	}
	return qdisc.KindHTB
}

// sentBy gives the counters of a container's class at nic0, whose root has to
// be of a kind.
func (h *host) sentBy(kind qdisc.Kind, c container.Container) qdisc.Stats {
	h.t.Helper()
	d, err := qdisc.Open(h.open(h.ns), h.nic0)
	must(h.t, err)
	defer d.Close()
	all, err := d.Stats(kind)
	must(h.t, err)
	st, there := all[uint16(h.slots.Lookup(slot.Of(c)))]
	if !there {
		h.t.Errorf("no class for %s: %v", c.Name, all)
	}
	return st
}

// A bound on latency is kept by HFSC where there is one, unless somebody has a
// priority; then, and elsewhere, by HTB. What cannot be kept is refused.
func TestLatencyPolicy(t *testing.T) {
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	before := h.state()
	packets := func(kind qdisc.Kind) {
		t.Helper()
		was := h.sentBy(kind, c).Packets
		if sent := h.send(box, "10.66.0.1:9000"); h.sentBy(kind, c).Packets-was < sent {
			t.Errorf("%s: %d packets were sent, %d are in the class", kind, sent, h.sentBy(kind, c).Packets-was)
		}
	}
	urgent := policy.Net{Rate: mbit, Latency: 2 * time.Millisecond}
	must(t, h.apply(two, policy.Net{Weight: 3}))
	must(t, h.apply(c, urgent))
	packets(shaper())
	again := len(h.journal.Entries())
	low := 7
	must(t, h.apply(two, policy.Net{Weight: 3, Priority: &low})) // HFSC knows no priorities
	packets(qdisc.KindHTB)
	must(t, h.apply(two, policy.Net{Weight: 3}))
	packets(shaper())
	if n := len(h.journal.Entries()); n != again {
		t.Errorf("%d entries, had %d: %+v", n, again, h.journal.Entries())
	}

	// Shorter than a packet of another takes: nothing changes.
	during := h.state()
	err := h.apply(c, policy.Net{Rate: mbit, Latency: 500 * time.Microsecond})
	if !errors.Is(err, model.ErrInfeasible) || !strings.Contains(err.Error(), "uplink nic0: latency refused: a packet of any other container") {
		t.Errorf("500 us: %v", err)
	}
	if h.state() != during {
		t.Errorf("refused, and changed:\n%swas\n%s", h.state(), during)
	}
	packets(shaper())

	// The last latency goes, and with it the need for HFSC.
	must(t, h.apply(c, policy.Net{Rate: mbit}))
	packets(qdisc.KindHTB)

	// Towards the container.
	must(t, h.due(c, policy.Net{Rate: mbit}, urgent))
	h.take(box)
	h.send(h.wire, "10.66.0.2:9000")
	d, err := qdisc.Open(h.open(h.ns), h.index(h.ns, fmt.Sprint("flifb", h.nic0)))
	must(t, err)
	defer d.Close()
	if all, err := d.Stats(shaper()); err != nil || all[uint16(h.slots.Lookup(slot.Of(c)))].Packets < 50 {
		t.Errorf("towards the container: %v, %v", all, err)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	must(t, h.traffic.Remove(t.Context(), two.ID))
	if h.state() != before || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end:\n%swas\n%s%+v", h.state(), before, h.journal.Entries())
	}
}

// ping asks the wire's server every 2 ms, and gives how long answers took,
// sorted.
func (h *host) ping(box *sandbox.Box, to string, n int) []time.Duration {
	h.t.Helper()
	var took []time.Duration
	must(h.t, box.Do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		buf := make([]byte, 64)
		for range n {
			<-tick.C
			start := time.Now()
			if _, err := c.Write(buf); err != nil {
				return err
			}
			c.SetReadDeadline(start.Add(500 * time.Millisecond))
			if _, err := c.Read(buf); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
			took = append(took, time.Since(start))
		}
		return nil
	}))
	slices.Sort(took)
	return took
}

// BenchmarkLatency gives how long a request to the wire takes, there and back,
// beside a container that floods the uplink: with a weight of its own, and with
// a bound of 2 ms.
func BenchmarkLatency(b *testing.B) {
	for _, load := range []struct {
		name string
		send []string
	}{
		{"alone", nil},
		{"six bulk TCP", tcp(6)},
		{"UDP flood", []string{"udp-send", "--rate", "flood", "--size", "1400"}},
	} {
		for _, tt := range []struct {
			name string
			net  policy.Net
		}{
			{"not shaped", policy.Net{}},
			{"in everybody's class", policy.Net{}},
			{"weight", policy.Net{Weight: 1}},
			{"latency 2ms", policy.Net{Rate: 10 * mbit, Latency: 2 * time.Millisecond}},
		} {
			b.Run(load.name+", "+tt.name, func(b *testing.B) {
				h := newHost(b, gbit)
				h.start()
				x, y, to := h.two("bridge")
				h.run(h.wire, "rr-server", "--listen", ":9009")
				if tt.name != "not shaped" {
					must(b, h.apply(fake(1), policy.Net{Weight: 1}))
					must(b, h.apply(y.c, tt.net))
					if tt.name == "weight" || tt.name == "latency 2ms" {
						must(b, h.apply(x.c, policy.Net{Weight: 1}))
					}
				}
				if load.send != nil {
					kind := map[string]string{"tcp-send": "tcp-recv", "udp-send": "udp-recv"}[load.send[0]]
					h.run(h.wire, kind, "--listen", ":9001")
					h.run(x.box, append(load.send, "--to", to+":9001")...)
				}
				time.Sleep(500 * time.Millisecond)
				for b.Loop() {
					took := h.ping(y.box, to+":9009", 1500)
					for name, q := range map[string]float64{"p50-us": 0.5, "p99-us": 0.99, "p99.9-us": 0.999} {
						b.ReportMetric(float64(took[int(q*float64(len(took)-1))].Microseconds()), name)
					}
				}
			})
		}
	}
}
