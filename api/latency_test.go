package api

import (
	"fmt"
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
	}, nil)
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

// What the measurement took comes off each stage and each sum that has it, and nothing
// becomes less than nothing. A round trip loses it on both ways and at the uplink.
func TestLatencyCosts(t *testing.T) {
	costs := LatencyCosts{{LatencyQueue, 9, 1}, {LatencyXmit, 9, 2}, {LatencyReceive, 9, 4}, {LatencyPoll, 9, 8}}
	f := func(v float64) *float64 { return &v }
	request := LatencyRecord{Direction: "egress", Added: f(90), Stack: f(100), Mace: f(5), Stages: []LatencyPart{{"device", 10}, {"deliver", 1}, {"forward", 39}, {"qdisc", 50}}}
	got := costs.Less(request)
	if *got.Added != 90-7 || *got.Stack != 100-8 || *got.Mace != 0 || fmt.Sprint(got.Stages) != "[{device 9} {deliver 0} {forward 35} {qdisc 49}]" {
		t.Errorf("%v %v %v %v", *got.Added, *got.Stack, *got.Mace, got.Stages)
	}
	if request.Stages[0].Seconds != 10 || *request.Stack != 100 {
		t.Errorf("the packet itself has changed: %+v", request)
	}
	reply := LatencyRecord{Direction: "ingress", Stack: f(60), Stages: []LatencyPart{{"gro", 10}, {"forward", 10}, {"qdisc", 10}, {"deliver", 10}, {"socket", 20}}}
	if got := costs.Less(reply); got.Added != nil || *got.Stack != 60-19 {
		t.Errorf("%v %v", got.Added, *got.Stack)
	}
	trip := costs.lessTrip(LatencyTrip{Raw: 260, Egress: 100, Ingress: 60, Corrected: 100}, request, reply)
	if trip.Egress != 92 || trip.Ingress != 41 || trip.Corrected != 98 || trip.Raw != 231 {
		t.Errorf("%+v", trip)
	}
	if same := LatencyCosts(nil).lessTrip(trip, request, reply); same != trip {
		t.Errorf("nothing is known, and it is %+v", same)
	}
}
