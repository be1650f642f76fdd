package traffic_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// receive has senders on the wire send to containers.
func (h *host) receive(receivers []sender, warm time.Duration) {
	h.t.Helper()
	for _, r := range receivers {
		must(h.t, h.due(r.c, policy.Net{}, r.net))
	}
	for i, r := range receivers {
		kind := map[string]string{"tcp-send": "tcp-recv", "udp-send": "udp-recv"}[r.send[0]]
		h.run(r.box, kind, "--listen", fmt.Sprintf(":%d", 9001+i))
	}
	for i, r := range receivers {
		h.run(h.wire, append(r.send, "--to", fmt.Sprintf("%s:%d", r.to, 9001+i))...)
	}
	time.Sleep(warm)
}

// received gives what each class has sent on to its container in a window, bit/s.
func (h *host) received(receivers []sender, window time.Duration) []float64 {
	h.t.Helper()
	bytes := make([]uint64, len(receivers))
	start := time.Now()
	for i := range receivers {
		bytes[i] = h.arrived(&receivers[i].c).Bytes
	}
	time.Sleep(window)
	took := time.Since(start).Seconds()
	var out []float64
	for i := range receivers {
		out = append(out, 8*float64(h.arrived(&receivers[i].c).Bytes-bytes[i])/took)
	}
	return out
}

// twoReceivers makes two containers of a mode that can be reached from the wire.
func (h *host) twoReceivers(mode string) (a, b sender) {
	h.t.Helper()
	a, b, _ = h.two(mode)
	prefix := map[string]string{"routed": "10.67.0.", "overlay": "10.69.0."}[mode]
	if prefix == "" {
		prefix = "10.66.0."
	}
	a.to, b.to = prefix+"2", prefix+"3"
	if mode == "host" {
		a.to, b.to = prefix+"254", prefix+"254"
	}
	return a, b
}

// Six connections towards one container are worth no more than one towards
// another: a short look at what BenchmarkIngressShares measures.
func TestIngressShares(t *testing.T) {
	needSharing(t)
	h := newHost(t, 100*mbit)
	h.start()
	a, b := h.twoReceivers("bridge")
	a.net, b.net = policy.Net{Weight: 1}, policy.Net{Weight: 1}
	h.receive([]sender{a, b}, 500*time.Millisecond)
	alike(t, 75*mbit, func() []float64 { return h.received([]sender{a, b}, time.Second) })
}

// BenchmarkIngressShares gives the shares that two containers get of what an
// uplink receives.
func BenchmarkIngressShares(b *testing.B) {
	const warm, window = time.Second, 4 * time.Second
	flood := []string{"udp-send", "--rate", "flood", "--size", "1400"}
	weights := func(one, two uint32) func(x, y *sender) {
		return func(x, y *sender) { x.net.Weight, y.net.Weight = one, two }
	}
	for _, tt := range []struct {
		name, mode string
		set        func(x, y *sender)
	}{
		{"6 to 1 connections, weights 1 to 1", "bridge", weights(1, 1)},
		{"6 to 1 connections, weights 1 to 1", "routed", weights(1, 1)},
		{"6 to 1 connections, weights 1 to 1", "overlay", weights(1, 1)},
		{"6 to 1 connections, weights 1 to 1", "macvlan", weights(1, 1)},
		{"6 to 1 connections, weights 1 to 1", "host", weights(1, 1)},
		{"6 to 1 connections, weights 1 to 2", "bridge", weights(1, 2)},
		{"UDP flood of weight 9 to rate 300 and ceil 300", "bridge", func(x, y *sender) {
			x.send, x.net.Weight, y.net.Rate, y.net.Ceil = flood, 9, 300*mbit, 300*mbit
		}},
		{"6 connections of weight 9 to a UDP flood of rate 300 and ceil 300", "bridge", func(x, y *sender) {
			y.send, x.net.Weight, y.net.Rate, y.net.Ceil = flood, 9, 300*mbit, 300*mbit
		}},
	} {
		b.Run(tt.mode+", "+tt.name, func(b *testing.B) {
			h := newHost(b, gbit)
			h.start()
			x, y := h.twoReceivers(tt.mode)
			tt.set(&x, &y)
			for b.Loop() {
				h.receive([]sender{x, y}, warm)
				got := h.received([]sender{x, y}, window)
				b.ReportMetric(got[0]/mbit, "got1-Mbit/s")
				b.ReportMetric(got[1]/mbit, "got2-Mbit/s")
				b.ReportMetric(got[1]/got[0], "2to1")
			}
		})
	}
}
