package traffic_test

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
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

// received returns what each class has forwarded to its container in a window, bit/s.
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

// twoReceivers makes two containers of a mode that the wire can reach.
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

// Two containers receive at once, in every mode: the kernel has the right classes, each packet of a
// known flow is in the class of its receiver, and none is lost.
func TestIngressClasses(t *testing.T) {
	testkit.OnKernels(t)
	needSharing(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "routed", "overlay", "macvlan", "host") {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			a, b := h.twoReceivers(mode)
			mostly(t, h.due(a.c, policy.Net{}, policy.Net{Weight: 3, Ceil: 600 * mbit}))
			must(t, h.due(b.c, policy.Net{}, policy.Net{Rate: 150 * mbit}))
			// The IFB has 950 Mbit/s, with 902.5 to promise: 150, and of the rest 1 for the host
			// and 3.
			const left = 902_500_000 - 150*mbit
			want := map[uint16]class{
				qdisc.MinorTop: {950 * mbit, 950 * mbit, 0}, qdisc.MinorDefault: {left / 4, 950 * mbit, 0},
				h.minor(a.c): {left / 4 * 3, 600 * mbit, 0}, h.minor(b.c): {150 * mbit, 950 * mbit, 0},
			}
			if is := h.classesOf(h.ns, netdev.IFBName(h.nic0)); !maps.Equal(is, want) {
				t.Errorf("classes %v, want %v", is, want)
			}
			boards := []*load.Board{h.takeAt(a.box, 9001), h.takeAt(b.box, 9002)}
			one, two := h.learnt(a.to+":9001", boards[0]), h.learnt(b.to+":9002", boards[1])
			own, other := h.arrived(&a.c).Packets, h.arrived(&b.c).Packets
			wasOne, wasTwo := boards[0].Read(), boards[1].Read()
			for range datagrams { // in turns, three to one
				must(t, errors.Join(write(one, 3, 100), write(two, 1, 100)))
			}
			for _, r := range []struct {
				c         *container.Container
				got       *load.Board
				before    load.Reading
				was, sent uint64
			}{{&a.c, boards[0], wasOne, own, 3 * datagrams}, {&b.c, boards[1], wasTwo, other, datagrams}} {
				through, st := h.through(r.got, r.before, r.sent), h.arrived(r.c)
				if gained := st.Packets - r.was; gained != r.sent || through != r.sent || st.Drops != 0 {
					t.Errorf("%d packets were sent to %s: %d are in its class, %d dropped, %d got through", r.sent, r.c.Name, gained, st.Drops, through)
				}
			}
		})
	}
}

// BenchmarkIngressShares measures the shares of two containers in what an uplink receives.
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
