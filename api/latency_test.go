package api

import (
	"math"
	"testing"
	"time"
)

// A round trip is the time between the two packets, and what the host took of it.
func TestLatencyTrips(t *testing.T) {
	at := time.Unix(1000, 0)
	seconds := func(v float64) *float64 { return &v }
	packet := func(direction, protocol string, ms int, stack float64, seq uint64, port int) LatencyRecord {
		r := LatencyRecord{Time: at.Add(time.Duration(ms) * time.Millisecond), Direction: direction, Protocol: protocol, Seq: seq, Stack: seconds(stack)}
		r.From, r.To, r.FromPort, r.ToPort = "10.0.0.2", "192.0.2.1", port, port
		if direction == "ingress" {
			r.From, r.To = r.To, r.From
		}
		return r
	}
	late := packet("ingress", LatencyUDP, 90, 0, 0, 9)
	late.Stack = nil
	syn := packet("egress", LatencyTCP, 30, 0.002, 77, 443)
	syn.Syn = true
	answer := packet("ingress", LatencyTCP, 40, 0.001, 99, 443)
	answer.Syn = true
	trips, unpaired := LatencyTrips([]LatencyRecord{
		packet("egress", LatencyICMP, 0, 0.001, 1, 0), packet("egress", LatencyICMP, 5, 0.001, 2, 0),
		packet("ingress", LatencyICMP, 20, 0.003, 2, 0), packet("ingress", LatencyICMP, 10, 0.002, 1, 0),
		syn, packet("egress", LatencyTCP, 35, 0.5, 78, 443), answer,
		packet("egress", LatencyUDP, 80, 0.001, 0, 9), late, packet("egress", LatencyICMP, 50, 0.001, 3, 0),
	})
	if len(trips) != 3 || unpaired != 3 {
		t.Fatalf("%d unpaired, trips %+v", unpaired, trips)
	}
	for i, want := range []LatencyTrip{
		{Time: at, Protocol: LatencyICMP, Seq: 1, Raw: 0.011, Egress: 0.001, Ingress: 0.002, Corrected: 0.008},
		{Time: at.Add(5 * time.Millisecond), Protocol: LatencyICMP, Seq: 2, Raw: 0.016, Egress: 0.001, Ingress: 0.003, Corrected: 0.012},
		{Time: at.Add(30 * time.Millisecond), Protocol: LatencyTCP, Raw: 0.012, Egress: 0.002, Ingress: 0.001, Corrected: 0.009},
	} {
		want.Peer = "192.0.2.1"
		got := trips[i]
		for _, v := range []*float64{&got.Raw, &got.Corrected} {
			*v = math.Round(*v*1e9) / 1e9
		}
		if got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}
