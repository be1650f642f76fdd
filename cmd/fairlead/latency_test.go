package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
)

// latencyStub answers with one report, and with packets one after the other.
type latencyStub struct {
	api.Backend
	report api.Latency
	asked  []api.LatencyFilter
}

func (s *latencyStub) Report(_ context.Context, ask api.Ask) (any, error) {
	f, ok := ask.Body.(api.LatencyFilter)
	if !ok {
		return s.report, nil
	}
	s.asked = append(s.asked, f)
	n := uint64(len(s.asked))
	added, stack := 0.0000052, 0.0000081
	r := api.LatencyRecord{
		Time: time.Unix(1552589043, 315681000).UTC(), Direction: "egress", Protocol: "icmp", From: "10.0.0.2", To: "192.0.2.1", Seq: n, Bytes: 84,
		Added: &added, Stack: &stack, Stages: []api.LatencyPart{{Stage: "device", Seconds: 0.0000003}, {Stage: "qdisc", Seconds: 0.00012}},
	}
	return api.LatencyRecords{Next: n + 1, Records: []api.LatencyRecord{r}}, nil
}

func TestLatency(t *testing.T) {
	stage := func(name string, p50 float64) *api.LatencyStage {
		return &api.LatencyStage{Stage: name, Packets: 1000, P50: p50, P90: 2 * p50, P99: 10 * p50, Max: 0.02}
	}
	times := api.LatencyTimes{
		Coverage: api.LatencyCoverage{Seen: 2000, Matched: 999, Unsampled: 1000}, Added: stage("added", 0.000005), Stack: stage("stack", 0.0000061),
		Stages: []api.LatencyStage{*stage("deliver", 0.000002), *stage("qdisc", 0.0004)},
	}
	s := &latencyStub{report: api.Latency{Passed: 12, Containers: []api.LatencyContainer{
		{Container: 7, Name: "web-1", Direction: "egress", LatencyTimes: times, Protocols: []api.LatencyProtocol{{Protocol: "udp", LatencyTimes: times}}},
		{Container: 8, Direction: "ingress", LatencyTimes: api.LatencyTimes{}},
	}}}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, `CONTAINER  DIRECTION  STAGE  PACKETS    P50     P90     P99   MAX  COVERAGE
web-1      egress     added    1.00k  5.0us  10.0us  50.0us  20ms    99.9 %
web-1      egress     stack    1.00k  6.1us  12.2us  61.0us  20ms    99.9 %
id 8       ingress    -            0      -       -       -     -         -
12 times a packet was passed over: a CPU had more than it measures, and chose by chance
`},
		{[]string{"--stages", "--protocols"}, `CONTAINER  DIRECTION  PROTOCOL  STAGE    PACKETS    P50     P90     P99   MAX  COVERAGE
web-1      egress     udp       added      1.00k  5.0us  10.0us  50.0us  20ms    99.9 %
web-1      egress     udp       stack      1.00k  6.1us  12.2us  61.0us  20ms    99.9 %
web-1      egress     udp       deliver    1.00k  2.0us   4.0us  20.0us  20ms    99.9 %
web-1      egress     udp       qdisc      1.00k  400us   800us     4ms  20ms    99.9 %
id 8       ingress    -         -              0      -       -       -     -         -
12 times a packet was passed over: a CPU had more than it measures, and chose by chance
`},
	} {
		status, out, errs := against(t, s, append([]string{"latency", "--interval", "100ms"}, tt.args...)...)
		if status != statusDone || errs != "" {
			t.Fatalf("%v: status %d: %s", tt.args, status, errs)
		}
		if diff := cmp.Diff(tt.want, out); diff != "" {
			t.Errorf("%v: (-want +got)\n%s", tt.args, diff)
		}
	}
	s.report.Containers = nil
	if _, out, _ := against(t, s, "latency", "web-1", "--total"); !strings.Contains(out, "fairlead.latency=on") {
		t.Errorf("without containers: %q", out)
	}
}

// Each request goes on where the one before ended, and asks for what is wanted.
func TestLatencyTrace(t *testing.T) {
	s := &latencyStub{}
	status, out, errs := against(t, s, "latency", "trace", "web-1", "--count", "2", "--protocol", "icmp", "--peer", "192.0.2.0/24")
	want := "egress  icmp  10.0.0.2 > 192.0.2.1 seq 1 84 bytes  added 5.2us  stack 8.1us  (device 0.3us, qdisc 120us)"
	if status != statusDone || len(strings.Split(out, "\n")) != 3 || !strings.Contains(out, want) {
		t.Errorf("status %d: %q, %s", status, out, errs)
	}
	if len(s.asked) != 2 || s.asked[0].After != 0 || s.asked[1].After != 2 || s.asked[1].Protocol != "icmp" || s.asked[1].Peer.String() != "192.0.2.0/24" {
		t.Errorf("asked for %+v", s.asked)
	}
	if _, out, _ := against(t, s, "latency", "trace", "web-1", "--count", "1", "--slide"); out != "[1552589043.315681] (3) egress: 8100\n" {
		t.Errorf("slide: %q", out)
	}
	for _, args := range [][]string{{}, {"web-1", "--self"}, {"web-1", "--protocol", "sctp"}, {"web-1", "--peer", "x"}, {"web-1", "-o", "yaml"}} {
		if status, _, errs := against(t, s, append([]string{"latency", "trace"}, args...)...); status != statusUsage || errs == "" {
			t.Errorf("%v: status %d: %s", args, status, errs)
		}
	}
}
