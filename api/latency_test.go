package api

import (
	"context"
	"fmt"
	"math"
	"net/url"
	"testing"
	"time"
)

func TestRecordsAsk(t *testing.T) {
	for _, tt := range []struct {
		query, err string
	}{
		{"", ""},
		{"after=7&over=2s&peer=10.0.0.1&port=53&protocol=udp&sample=16", ""},
		{"peer=fd00::/8", ""},
		{"after=-1", `after="-1": want a whole number`},
		{"over=6s", `over="6s": want a time of at most 5s, as 2s`},
		{"over=0s", `over="0s": want a time of at most 5s, as 2s`},
		{"peer=web-1", `peer="web-1": want an address, or a prefix, as 10.0.0.0/8`},
		{"port=0", `port="0": want a number from 1 to 65535`},
		{"port=65536", `port="65536": want a number from 1 to 65535`},
		{"sample=0", `sample="0": want a whole number from 1`},
		{"protocol=sctp", `protocol="sctp": want tcp, udp, icmp or other`},
	} {
		q, err := url.ParseQuery(tt.query)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = recordsAsk(q, maxSelfOver)
		got := ""
		if err != nil {
			got = err.(*Error).Text
		}
		if got != tt.err {
			t.Errorf("%q: %q, want %q", tt.query, got, tt.err)
		}
	}
}

// What the client asks for is what the agent reads.
func FuzzRecordsAsk(f *testing.F) {
	for _, s := range []string{"", "after=7&over=2s&peer=10.0.0.1&port=53&protocol=udp&sample=3", "peer=fd00::1%25eth0", "peer=10.0.0.7/8", "peer=%3A%3Affff%3A10.0.0.1", "port=-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		want, over, err := recordsAsk(q, MaxOver)
		if err != nil {
			return
		}
		q, err = url.ParseQuery(want.query(over))
		if err != nil {
			t.Fatal(err)
		}
		got, again, err := recordsAsk(q, MaxOver)
		if err != nil || got != want || again != over {
			t.Errorf("%q: %+v, %v; again %+v, %v, %v", query, want, over, got, again, err)
		}
	})
}

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

// selfBackend notes what is asked of the feature, and has two packets.
type selfBackend struct {
	backend
	asked []Ask
}

func (b *selfBackend) Report(_ context.Context, ask Ask) (any, error) {
	b.asked = append(b.asked, ask)
	if on, ok := ask.Body.(LatencyTracing); ok {
		on.Until = time.Unix(1000, 0)
		return on, nil
	}
	added, stack := 46.208e-6, 80.932e-6
	at := time.Unix(1552589043, 315681000)
	return LatencyRecords{Next: 3, Records: []LatencyRecord{
		{Time: at, Direction: "egress", Seq: 1, Added: &added, Stack: &stack}, {Time: at, Direction: "ingress", Seq: 1, Added: &added}, {Time: at, Direction: "egress"},
	}}, nil
}

// A container switches its own tracing on and off, and reads its packets.
func TestSelfLatency(t *testing.T) {
	b := new(selfBackend)
	socket := served(t, b, 0o666, ServeSelf)
	c := Dial(socket)
	defer c.Close()
	on, err := c.SelfLatencyTracing(t.Context(), true)
	if err != nil || !on.On || on.Until.IsZero() {
		t.Errorf("%+v, %v", on, err)
	}
	got, err := c.SelfLatencyRecords(t.Context(), LatencyFilter{After: 1, Sample: 4}, 0)
	if err != nil || got.Next != 3 || len(got.Records) != 3 || *got.Records[0].Stack != 80.932e-6 || got.Records[1].Stack != nil {
		t.Errorf("%+v, %v", got, err)
	}
	if len(b.asked) != 2 {
		t.Fatalf("asked %+v", b.asked)
	}
	for i, want := range []any{LatencyTracing{On: true}, LatencyFilter{After: 1, Most: maxSelfRecords, Sample: 4}} {
		if a := b.asked[i]; a.Feature != "latency" || a.Container != Ref(b.Caller(Peer{})) || a.Body != want {
			t.Errorf("asked %+v, want %+v of the caller", a, want)
		}
	}
}

// On the self socket a container sees its own part of a wait, and one sum for all others.
func TestWaitAlone(t *testing.T) {
	w := LatencyWait{Stage: "deliver", Seconds: 10, Unknown: 1, By: []LatencyCulprit{
		{Work: LatencyTasks, Container: 8, Name: "secret", Seconds: 4},
		{Work: LatencyPackets, Container: 7, Name: "me", Own: true, Seconds: 3},
		{Work: LatencyTasks, Cgroup: "/secret", Seconds: 2},
	}}
	got := w.alone()
	if len(got.By) != 2 || got.By[0].Name != "me" || got.By[1] != (LatencyCulprit{Work: LatencyOthers, Seconds: 6}) || len(w.By) != 3 {
		t.Errorf("%+v", got)
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
