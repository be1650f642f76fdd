package traffic_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// sender is a container that sends at full speed to a port of the wire.
type sender struct {
	box  *sandbox.Box
	c    container.Container
	send []string // the generator's arguments
	to   string   // its address from the wire
	net  policy.Net
}

// run starts a generator in a box, and returns its board when it is at work.
func (h *host) run(box *sandbox.Box, args ...string) *load.Board {
	h.t.Helper()
	board, _ := h.Load(box, nil, args...)
	return board
}

// begin starts all senders at once, and returns the boards of their receivers.
func (h *host) begin(to string, senders []sender, warm time.Duration) (boards []*load.Board) {
	h.t.Helper()
	for _, s := range senders {
		must(h.t, h.apply(s.c, s.net))
	}
	for i, s := range senders {
		kind := map[string]string{"tcp-send": "tcp-recv", "udp-send": "udp-recv"}[s.send[0]]
		boards = append(boards, h.run(h.wire, kind, "--listen", fmt.Sprintf(":%d", 9001+i)))
	}
	for i, s := range senders {
		h.run(s.box, append(s.send, "--to", fmt.Sprintf("%s:%d", to, 9001+i))...)
	}
	time.Sleep(warm)
	return boards
}

// measure returns for each sender what its class has sent in a window, bit/s on the wire, and what
// has arrived, bit/s of payload.
func (h *host) measure(senders []sender, boards []*load.Board, window time.Duration) (sent, arrived []float64) {
	h.t.Helper()
	before := make([]load.Reading, len(senders))
	bytes := make([]uint64, len(senders))
	start := time.Now()
	for i := range senders {
		before[i], bytes[i] = boards[i].Read(), h.stats(&senders[i].c).Bytes
	}
	time.Sleep(window)
	took := time.Since(start).Seconds()
	for i := range senders {
		sent = append(sent, 8*float64(h.stats(&senders[i].c).Bytes-bytes[i])/took)
		arrived = append(arrived, boards[i].Read().Since(before[i]).BitRate())
	}
	return sent, arrived
}

func tcp(conns int) []string { return []string{"tcp-send", "--conns", fmt.Sprint(conns)} }

// two makes two containers in a mode, and returns the address of the wire there.
func (h *host) two(mode string) (a, b sender, to string) {
	h.t.Helper()
	to = "10.66.0.1"
	switch mode {
	case "bridge":
		h.bridge()
		a.box, a.c = h.add("one", "10.66.0.2/24", h.ns)
		b.box, b.c = h.add("two", "10.66.0.3/24", h.ns)
	case "routed":
		a.box, a.c = h.routed()
		b.box, b.c = h.add("two", "10.67.0.3/24", h.ns)
		h.Route(b.box, "0.0.0.0/0", "10.67.0.1")
	case "overlay":
		a.box, a.c = h.overlay(false)
		b.box, b.c = h.add("two", "10.69.0.3/24", h.ns)
		to = "10.69.0.1"
	case "macvlan":
		a.box, a.c = h.macvlan("one", "10.66.0.2/24")
		b.box, b.c = h.macvlan("two", "10.66.0.3/24")
	case "host":
		h.Address(h.ns, "nic0", netip.MustParsePrefix("10.66.0.254/24").String())
		a.box = h.Create(sandbox.Spec{Name: "one", Network: h.ns})
		b.box = h.Create(sandbox.Spec{Name: "two", Network: h.ns})
		a.c, b.c = h.describe(a.box), h.describe(b.box)
	}
	a.send, b.send = tcp(6), tcp(1)
	return a, b, to
}

// Two containers send at once, in every mode: the kernel has the right classes, each packet is in
// the class of its sender, and none is lost.
func TestClasses(t *testing.T) {
	testkit.OnKernels(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "routed", "overlay", "macvlan", "host") {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			a, b, to := h.two(mode)
			got := h.take(h.wire)
			to += ":9000"
			h.resolve(a.box, h.wire, to)
			h.resolve(b.box, h.wire, to)
			first, last := 0, 1
			mostly(t, h.apply(a.c, policy.Net{Weight: 3, Ceil: 700 * mbit, Priority: &last}))
			must(t, h.apply(b.c, policy.Net{Rate: 150 * mbit, Priority: &first}))
			// 800 Mbit/s are left: 1 for the host, which comes last, and 3.
			want := map[uint16]class{
				qdisc.MinorTop: {gbit, gbit, 0}, qdisc.MinorDefault: {200 * mbit, gbit, 2},
				h.minor(a.c): {600 * mbit, 700 * mbit, 1}, h.minor(b.c): {150 * mbit, gbit, 0},
			}
			if is := h.classesOf(h.ns, "nic0"); !maps.Equal(is, want) {
				t.Errorf("classes %v, want %v", is, want)
			}
			was, own, other := got.Read(), h.stats(&a.c).Packets, h.stats(&b.c).Packets
			const n, m = 3 * datagrams, datagrams
			one, two := h.startSending(a.box, to, n, 100), h.startSending(b.box, to, m, 100)
			must(t, errors.Join(one.Wait(), two.Wait()))
			if through := h.through(got, was, n+m); through != n+m {
				t.Errorf("%d packets were sent, %d got through", n+m, through)
			}
			// Beside the datagrams there may be some packets of the protocols.
			for _, c := range []struct {
				c         *container.Container
				was, sent uint64
			}{{&a.c, own, n}, {&b.c, other, m}} {
				st := h.stats(c.c)
				if gained := st.Packets - c.was; gained < c.sent || gained > c.sent+m/4 || st.Drops != 0 {
					t.Errorf("%s has sent %d packets: %d are in its class, %d dropped", c.c.Name, c.sent, gained, st.Drops)
				}
			}
		})
	}
}

// BenchmarkShares measures the shares of two containers in an uplink.
func BenchmarkShares(b *testing.B) {
	const warm, window = time.Second, 4 * time.Second
	flood := []string{"udp-send", "--rate", "flood", "--size", "1400"}
	for _, tt := range []struct {
		name, mode string
		link       uint64
		set        func(x, y *sender)
	}{
		{"6 to 1 connections, weights 1 to 1", "bridge", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 1", "routed", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 1", "overlay", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 1", "macvlan", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 1", "host", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 1, 100 Mbit", "bridge", 100 * mbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 1 }},
		{"6 to 1 connections, weights 1 to 2", "bridge", gbit, func(x, y *sender) { x.net.Weight, y.net.Weight = 1, 2 }},
		{"weight 9 and 6 connections to rate 300 and ceil 300", "bridge", gbit, func(x, y *sender) {
			x.net.Weight, y.net.Rate, y.net.Ceil = 9, 300*mbit, 300*mbit
		}},
		{"UDP flood of weight 9 to rate 300 and ceil 300", "bridge", gbit, func(x, y *sender) {
			x.send, x.net.Weight, y.net.Rate, y.net.Ceil = flood, 9, 300*mbit, 300*mbit
		}},
		{"rate 100, priority 1 to rate 100, priority 0", "bridge", gbit, func(x, y *sender) {
			low, high := 1, 0
			x.net.Rate, x.net.Priority, y.net.Rate, y.net.Priority = 100*mbit, &low, 100*mbit, &high
		}},
	} {
		b.Run(tt.mode+", "+tt.name, func(b *testing.B) {
			h := newHost(b, tt.link)
			h.start()
			x, y, to := h.two(tt.mode)
			tt.set(&x, &y)
			for b.Loop() {
				sent, arrived := h.measure([]sender{x, y}, h.begin(to, []sender{x, y}, warm), window)
				b.ReportMetric(sent[0]/mbit, "wire1-Mbit/s")
				b.ReportMetric(sent[1]/mbit, "wire2-Mbit/s")
				b.ReportMetric(arrived[0]/mbit, "got1-Mbit/s")
				b.ReportMetric(arrived[1]/mbit, "got2-Mbit/s")
				b.ReportMetric(sent[1]/sent[0], "2to1")
			}
		})
	}
}
