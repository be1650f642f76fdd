package traffic

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// trafficStub returns one reading after the other.
type trafficStub struct {
	serve.Backend
	readings []api.Traffic
	over     []time.Duration // the measuring times requested
}

func (s *trafficStub) Report(_ context.Context, ask api.Ask) (any, error) {
	s.over = append(s.over, ask.Over)
	t := s.readings[0]
	if len(s.readings) > 1 {
		s.readings = s.readings[1:]
	}
	return t, nil
}

func shaped(t *testing.T, s *trafficStub, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return verbtest.Against(t, run, s, append([]string{"traffic", "--interval", "100ms"}, args...)...)
}

func TestTraffic(t *testing.T) {
	low := 3
	at := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	reading := func(taken time.Time, bytes, packets uint64) api.Traffic {
		c := api.Traffic{Taken: taken, Classes: []api.TrafficClass{
			{Container: 7, Name: "web-1", Uplink: "eth0", Direction: "egress", Link: 1e9, Asked: &api.TrafficAsked{Rate: 150e6, Ceil: 200e6}, Guaranteed: 150e6, Ceil: 200e6,
				Bytes: bytes, Packets: packets, Borrowed: packets / 2, BacklogBytes: 187_500, BacklogPackets: 3, Overlimits: packets},
			{Container: 8, Name: "(odd)\x1b", Uplink: "eth0", Direction: "egress", Link: 1e9, Asked: &api.TrafficAsked{Weight: 3, Priority: &low, Latency: 0.002}, Guaranteed: 600e6, Ceil: 1e9,
				Bytes: 10, Packets: 1, Drops: 12_345},
			{Uplink: "eth0", Direction: "egress", Link: 1e9, Guaranteed: 200e6, Ceil: 1e9},
			{Container: 7, Name: "web-1", Uplink: "eth0", Direction: "ingress", Link: 1e9, Asked: &api.TrafficAsked{Ceil: 1e9}, Guaranteed: 475e6, Ceil: 1e9},
		}}
		api.SortTraffic(c.Classes)
		return c
	}
	before, after := reading(at, 1000, 100), reading(at.Add(2*time.Second), 25_001_000, 1100)
	verbtest.Prints(t, run, &trafficStub{readings: []api.Traffic{before, after}}, `eth0, from containers, 1.00Gbit; over 2.0 s
CONTAINER    ASKED              GUARANTEED     SENT  BORROWED  WAITING  DROPS  AT CEIL  DRAIN
"(odd)\x1b"  w3 p3 2ms             600Mbit     0bit         -        -      0        0      -
web-1        150mbit <=200mbit     150Mbit  100Mbit      50 %    188kB      0    1.00k   10ms
(others)     -                     200Mbit     0bit         -        -      0        0      -

eth0, to containers, 1.00Gbit; over 2.0 s
CONTAINER  ASKED    GUARANTEED  SENT  BORROWED  WAITING  DROPS  AT CEIL  DRAIN
web-1      <=1gbit     475Mbit  0bit         -        -      0        0      -
`, "traffic", "--interval", "100ms")
	status, out, _ := shaped(t, &trafficStub{readings: []api.Traffic{before}}, "--total")
	if status != 0 || !strings.Contains(out, " 12.3k ") || !strings.Contains(out, " 1.00kB ") || strings.Contains(out, "over") {
		t.Errorf("totals: status %d\n%s", status, out)
	}
	says := verbtest.Ended(t, cli.Done, `"achieved_bits_per_second": 100000000`, `"sent_packets": 1000`)
	says(shaped(t, &trafficStub{readings: []api.Traffic{before, after}}, "web-1", "-o", "json"))
	if _, out, _ = shaped(t, &trafficStub{readings: []api.Traffic{{}}}, "web-1"); out != "No policy sets bandwidth for this container.\n" {
		t.Errorf("nothing: %s", out)
	}
	before.Sharer, after.Sharer = "app", "app"
	if _, out, _ = shaped(t, &trafficStub{readings: []api.Traffic{before, after}}, "vpn"); !strings.HasPrefix(out, "Policy of app, which shares the network of this container:\n\neth0, from containers, ") {
		t.Errorf("shared: %s", out)
	}
}

func TestTrafficDelays(t *testing.T) {
	at := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	before, after := api.Traffic{Taken: at}, api.Traffic{Taken: at.Add(100 * time.Millisecond), Measured: &api.TrafficMeasured{Seconds: 0.1, Missed: 2000}}
	for i, d := range []api.TrafficDelay{{Packets: 9, P50: 0.0000123, P99: 0.00123, P999: 1.23}, {}, {}} {
		after.Classes = append(after.Classes, api.TrafficClass{Container: api.ID(i + 1), Name: fmt.Sprint("c", i), Uplink: "eth0", Direction: "egress", Link: 1e9, BacklogPackets: uint64(i / 2), Delay: &d})
	}
	s := &trafficStub{readings: []api.Traffic{before, after}}
	verbtest.Prints(t, run, s, `eth0, from containers, 1.00Gbit; over 0.1 s
CONTAINER  ASKED  GUARANTEED  SENT  BORROWED  WAITING  DROPS  AT CEIL     P50     P99  P99.9
c0         -            0bit  0bit         -        -      0        0    12us  1.23ms  1.23s
c1         -            0bit  0bit         -        -      0        0       -       -      -
c2         -            0bit  0bit         -        -      0        0  >100ms       -      -

Delays: 2.00k packets were not measured, because too many waited
`, "traffic", "--interval", "100ms")
	// An agent that always measures also has delays for totals.
	always := after
	always.Measured = nil
	if _, out, _ := shaped(t, &trafficStub{readings: []api.Traffic{always}}, "--total"); !strings.Contains(out, "  12us  1.23ms  1.23s\n") || strings.Contains(out, "100ms") {
		t.Errorf("totals:\n%s", out)
	}
	testkit.Same(t, "asked for", []time.Duration{0, 100 * time.Millisecond}, s.over)
	after.Measured = &api.TrafficMeasured{Error: "no such hook\x1b"}
	if _, out, _ := shaped(t, &trafficStub{readings: []api.Traffic{before, after}}); !strings.Contains(out, "DRAIN\n") || !strings.HasSuffix(out, "Delays: \"no such hook\\x1b\"\n") {
		t.Errorf("not measured:\n%s", out)
	}
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }

func TestUplinks(t *testing.T) {
	for _, tt := range []struct {
		in        []string
		want, err string
	}{
		{[]string{"eth0"}, "eth0", ""},
		{[]string{"eth1=2.5gbit", "eth0=100mbit"}, "eth0=100mbit,eth1=2500mbit", ""},
		{[]string{"eth1, eth0=1gbit"}, "eth0=1gbit,eth1", ""},
		{[]string{""}, "", "not a device name"},
		{[]string{"a/b=1gbit"}, "", "not a device name"},
		{[]string{"abcdefghijklmnop"}, "", "not a device name"},
		{[]string{"eth0=fast"}, "", "eth0: must start with a decimal number"},
		{[]string{"eth0=0"}, "", "the rate is 0"},
		{[]string{"eth0", "eth0=1gbit"}, "", "given twice"},
	} {
		u := uplinks(new(map[string]uint64))
		var err error
		for _, s := range tt.in {
			if err == nil {
				err = u.Set(s)
			}
		}
		if tt.err != "" {
			testkit.Fails(t, fmt.Sprint(tt.in), err, tt.err)
		} else if err != nil || u.String() != tt.want {
			t.Errorf("%q: %s, %v; want %s", tt.in, u.String(), err, tt.want)
		}
	}
}

func FuzzUplinks(f *testing.F) {
	f.Add("eth0=1gbit,eth1")
	f.Add("=,=")
	f.Fuzz(func(t *testing.T, s string) {
		u, again := uplinks(new(map[string]uint64)), uplinks(new(map[string]uint64))
		if u.Set(s) != nil {
			return
		}
		if err := again.Set(u.String()); err != nil || again.String() != u.String() {
			t.Errorf("%q: %s comes back as %s, %v", s, u.String(), again.String(), err)
		}
	})
}
