package latency

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// latencyStub returns one report, and packets in several answers.
type latencyStub struct {
	serve.Backend
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

func (s *latencyStub) Command(ctx context.Context, ask api.Ask) (any, error) {
	return s.Report(ctx, ask)
}

// latencyReport is one container with all stages, and one without packets.
func latencyReport() api.Latency {
	stage := func(name string, packets uint64, mean, p50 float64) *api.LatencyStage {
		return &api.LatencyStage{Stage: name, Packets: packets, Mean: mean, P50: p50, P90: 2 * p50, P99: 10 * p50, Max: 0.02}
	}
	times := api.LatencyTimes{
		Coverage: api.LatencyCoverage{Seen: 2000, Matched: 999, Unsampled: 1000}, Added: stage("added", 1000, 0.000009, 0.000005), Stack: stage("stack", 1000, 0.00001, 0.0000061),
		Stages: []api.LatencyStage{*stage("device", 1000, 0.000001, 0.000001), *stage("deliver", 500, 0.000006, 0.000002), *stage("forward", 1000, 0.000002, 0.0004), *stage("qdisc", 1000, 0.000004, 0.0004)},
	}
	return api.Latency{Passed: 12, Since: time.Unix(1552589041, 0), Taken: time.Unix(1552589043, 0), Containers: []api.LatencyContainer{
		{Container: 7, Name: "web-1-of-a-deployment-with-a-long-name", Direction: "egress", LatencyTimes: times, Protocols: []api.LatencyProtocol{{Protocol: "udp", LatencyTimes: times}}},
		{
			Container: 8, Direction: "ingress", Uncovered: []api.LatencyGap{{Stages: []string{"forward", "qdisc", "deliver", "added"}, Why: "the kernel has no event where a macvlan receives"}},
			Meanwhile: &api.LatencyMeanwhile{CPUs: []int{0, 3}, Own: 0.021, By: []api.LatencyNeighbour{{Container: 9, Name: "noisy", Share: 0.4123}, {Container: 10, Share: 0.02}, {Name: "system", Share: 0.0001}}},
		},
	}}
}

func TestLatency(t *testing.T) {
	s := &latencyStub{report: latencyReport()}
	const end = `id 8, ingress: no forward, qdisc, deliver, added: the kernel has no event
  where a macvlan receives
12 times a packet was passed over: its CPU had more than it measures
`
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, `CONTAINER            DIR      SPAN   COUNT    P50     P90     P99   MAX  COVERED
web-1-of-a-deploym…  egress   added  1.00k  5.0us  10.0us  50.0us  20ms  99.90 %
web-1-of-a-deploym…  egress   stack  1.00k  6.1us  12.2us  61.0us  20ms  99.90 %
id 8                 ingress  -          0      -       -       -     -        -
` + end},
		{[]string{"--protocols", "--wide"}, `CONTAINER                               DIR      PROTO  SPAN   COUNT    P50     P90     P99   MAX  COVERED
web-1-of-a-deployment-with-a-long-name  egress   udp    added  1.00k  5.0us  10.0us  50.0us  20ms  99.90 %
web-1-of-a-deployment-with-a-long-name  egress   udp    stack  1.00k  6.1us  12.2us  61.0us  20ms  99.90 %
id 8                                    ingress  -      -          0      -       -       -     -        -
` + end},
		{[]string{"--stages"}, `web-1-of-a-deployment-with-a-long-name, egress: 2.00k packets, 99.90 % covered
STAGE    WHERE THE MEAN GOES       MEAN    P50     P90     P99   MAX
device   ##                       1.0us  1.0us   2.0us  10.0us  20ms
deliver    #######                6.0us  2.0us   4.0us  20.0us  20ms
forward           ####            2.0us  400us   800us     4ms  20ms
qdisc                 #########   4.0us  400us   800us     4ms  20ms
added      ####################   9.0us  5.0us  10.0us  50.0us  20ms
stack    ######################  10.0us  6.1us  12.2us  61.0us  20ms

id 8, ingress: 0 packets, - covered
meanwhile CPU 0 3 worked 2.1 % of the time for its packets, 41.2 % for those of
noisy, 2.0 % for those of id 10
` + end},
	} {
		status, out, errs := verbtest.Against(t, run, s, append([]string{"latency", "--interval", "100ms"}, tt.args...)...)
		if status != cli.Done || errs != "" {
			t.Fatalf("%v: status %d: %s", tt.args, status, errs)
		}
		testkit.Same(t, fmt.Sprint(tt.args), tt.want, out)
		for line := range strings.Lines(out) {
			if n := utf8.RuneCountInString(line) - 1; n > columns.Line && !slices.Contains(tt.args, "--wide") {
				t.Errorf("%v: %d columns: %s", tt.args, n, line)
			}
		}
	}
	s.report.Containers = nil
	verbtest.Ended(t, cli.Done, "fairlead.latency=on")(verbtest.Against(t, run, s, "latency", "web-1", "--total"))
}

// Each request continues where the one before ended, with the same filter.
func TestLatencyTrace(t *testing.T) {
	s := &latencyStub{}
	status, out, errs := verbtest.Against(t, run, s, "latency", "trace", "web-1", "--count", "2", "--protocol", "icmp", "--peer", "192.0.2.0/24")
	want := "egress  icmp  10.0.0.2 > 192.0.2.1 seq 1 84 bytes  added 5.2us  stack 8.1us  (device 0.3us, qdisc 120us)"
	if status != cli.Done || len(strings.Split(out, "\n")) != 3 || !strings.Contains(out, want) {
		t.Errorf("status %d: %q, %s", status, out, errs)
	}
	if len(s.asked) != 2 || s.asked[0].After != 0 || s.asked[1].After != 2 || s.asked[1].Protocol != "icmp" || s.asked[1].Peer.String() != "192.0.2.0/24" {
		t.Errorf("asked for %+v", s.asked)
	}
	s.asked = nil
	if status, out, errs := verbtest.Against(t, run, s, "latency", "trace", "web-1", "--kept", "--count", "1", "--sample", "16"); status != cli.Done || len(s.asked) != 1 || s.asked[0].After != 1 || s.asked[0].Sample != 16 {
		t.Errorf("kept: status %d: %s%s, asked %+v", status, out, errs, s.asked)
	}
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
