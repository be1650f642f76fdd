package overlay

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/policy"
)

// overlayStub returns one reading after the other.
type overlayStub struct {
	serve.Backend
	readings []api.Overlay
	asked    []api.Ask
}

func (s *overlayStub) Report(_ context.Context, ask api.Ask) (any, error) {
	s.asked = append(s.asked, ask)
	if to, ok := ask.Body.(api.OverlaySwitch); ok {
		n := api.OverlayNetwork{Network: to.Network, State: api.OverlayOn}
		if to.Kill {
			n.State, n.Why = api.OverlayKilled, "by "+to.By+" at 2026-11-22T08:30:00Z"
		}
		return n, nil
	}
	o := s.readings[0]
	if len(s.readings) > 1 {
		s.readings = s.readings[1:]
	}
	return o, nil
}

func (s *overlayStub) Command(ctx context.Context, ask api.Ask) (any, error) {
	return s.Report(ctx, ask)
}

func overlaid(t *testing.T, s *overlayStub, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return verbtest.Against(t, run, s, append([]string{"overlay"}, args...)...)
}

// overlayReadings returns two readings with a network that is on, and one that is left alone.
func overlayReadings() (before, now api.Overlay) {
	at := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	before = api.Overlay{Taken: at, Networks: []api.OverlayNetwork{{Network: "flannel.1", Egress: api.OverlayTraffic{OverlayPackets: api.OverlayPackets{Fast: 1000, Slow: 10}}}}}
	now = api.Overlay{Taken: at.Add(2 * time.Second),
		Networks: []api.OverlayNetwork{
			{Network: "cilium_vxlan", Device: "cilium_vxlan", Kind: "vxlan", Port: 8472, Containers: 12, State: api.OverlayLeftAlone, Reason: "external",
				Why: "Cilium forwards the packets of this device by programs of its own; remove nothing, its own fast path is in force"},
			{Network: "flannel.1", Device: "flannel.1", Kind: "vxlan", VNI: 1, Port: 8472, Form: "routed", Uplinks: []string{"eth0"}, State: api.OverlayOn, Containers: 3, Accelerated: 2,
				Tables:     []api.OverlayTable{{Kind: "flow", Entries: 120, Capacity: 65536}, {Kind: "remote", Entries: 10, Capacity: 4096}, {Kind: "local", Entries: 3, Capacity: 1024}},
				Generation: 12, Raised: at.Add(-3 * time.Minute), RaisedBy: "a route to 10.244.2.0/24 was changed",
				Evictions: []api.OverlayEviction{{Cause: "route", Times: 12}, {Cause: "nftables", Times: 3}},
				Egress: api.OverlayTraffic{OverlayPackets: api.OverlayPackets{Fast: 13_300, FastBytes: 1_200_000, Slow: 130}, Saved: 410,
					Reasons: []api.OverlayReason{{Reason: api.SlowLease, Packets: 80}, {Reason: api.SlowTCPFlags, Packets: 40}}},
				Ingress: api.OverlayTraffic{OverlayPackets: api.OverlayPackets{Slow: 61},
					Reasons: []api.OverlayReason{{Reason: api.SlowOtherDirection, Packets: 60}, {Reason: "later\x1b", Packets: 1}}}},
		},
	}
	return before, now
}

func TestOverlay(t *testing.T) {
	before, now := overlayReadings()
	verbtest.Prints(t, run, &overlayStub{readings: []api.Overlay{before, now}}, `NETWORK       KIND   VNI  PORT  FORM    UPLINKS  CONTAINERS  STATE
cilium_vxlan  vxlan    -  8472  -       -        12          left alone
flannel.1     vxlan    1  8472  routed  eth0     2 of 3      on
cilium_vxlan is left alone: Cilium forwards the packets of this device by
  programs of its own; remove nothing, its own fast path is in force

flannel.1, over 2.0 s
DIRECTION   FAST  SLOW  HIT RATE  BYTES FAST  SAVED
egress     12.3k   120    99.0 %      1.20MB  410ns
ingress        0    61     0.0 %          0B      -
SLOW BY          EGRESS  INGRESS  BECAUSE
lease                80        0  the lease has run out; this packet renews it
other_direction       0       60  no packet of the other direction was seen
tcp_flags            40        0  SYN, FIN or RST of TCP
"later\x1b"           0        1  -
entries: 120 of 65.5k flow, 10 of 4.10k remote, 3 of 1.02k local
generation: 12, raised 3 min ago: a route to 10.244.2.0/24 was changed
forgotten: 12 route, 3 nftables
`, "overlay", "--interval", "100ms")

	verbtest.Ended(t, cli.Done, "\nflannel.1\nDIRECTION", "egress     13.3k   130 ")(overlaid(t, &overlayStub{readings: []api.Overlay{now}}, "--total"))
	says := verbtest.Ended(t, cli.Done, `"fast_packets": 12300`, `"raised_by": "a route to 10.244.2.0/24 was changed"`)
	says(overlaid(t, &overlayStub{readings: []api.Overlay{before, now}}, "--interval", "100ms", "-o", "json"))
	verbtest.Ended(t, cli.Done, "left alone")(overlaid(t, &overlayStub{readings: []api.Overlay{now}}, "--total", "-o", "yaml"))
	if _, out, _ := overlaid(t, &overlayStub{readings: []api.Overlay{{}}}, "--total"); out != "This host is on no overlay network.\n" {
		t.Errorf("none: %s", out)
	}
}

// While no policy turns overlay on, the verb shows the networks and the one line of policy that
// turns it on.
func TestOverlayOff(t *testing.T) {
	o := api.Overlay{Networks: []api.OverlayNetwork{
		{Network: "vx-001001-o3ex6@4026532291", Device: "vx-001001-o3ex6", NetNS: 4026532291, Kind: "vxlan", VNI: 4097, Port: 4789, Form: "bridged", Bridge: "br0", Uplinks: []string{"eth0", "eth1"}, Containers: 3, State: api.OverlayOff},
	}}
	verbtest.Prints(t, run, &overlayStub{readings: []api.Overlay{o}}, `NETWORK                     KIND    VNI  PORT  FORM     UPLINKS    CONTAINERS  STATE
vx-001001-o3ex6@4026532291  vxlan  4097  4789  bridged  eth0,eth1  3           off

The fast path is off unless policy asks for it. For one container:
  fairlead set CONTAINER overlay=on
For all, this line in /etc/fairlead/policy.d/50-overlay.yaml:
  {match: {name: "*"}, set: {overlay: on}}
`, "overlay", "--total")
	if _, problems := policy.ParseFile("50-overlay.yaml", []byte(overlayPolicy+"\n")); len(problems) > 0 {
		t.Errorf("the line: %v", problems)
	}
}

func TestOverlayContainer(t *testing.T) {
	o := api.Overlay{
		Networks: []api.OverlayNetwork{{Network: "flannel.1", State: api.OverlayOn}, {Network: "wg0", Kind: "wireguard", State: api.OverlayLeftAlone, Why: "its packets are encrypted"}},
		Containers: []api.OverlayContainer{{Container: 7, Name: "web-1", Ends: []api.OverlayEnd{
			{Network: "flannel.1", Device: "eth0",
				Egress:  api.OverlayWay{Way: api.WaySlow, Reason: "ceil", Why: "a device of fairlead holds net.ceil=50mbit behind it; `fairlead set web-1 net.ceil-` lets it be fast", OverlayPackets: api.OverlayPackets{Slow: 12_345}},
				Ingress: api.OverlayWay{Way: api.WayPeer, OverlayPackets: api.OverlayPackets{Fast: 999, Slow: 1}}},
			{Network: "wg0", Device: "eth1", Egress: api.OverlayWay{Way: api.WaySlow}, Ingress: api.OverlayWay{Way: api.WaySlow}},
		}}},
	}
	s := &overlayStub{readings: []api.Overlay{o}}
	status, out, errs := overlaid(t, s, "web-1", "--total")
	if status != cli.Done || errs != "" || s.asked[0].Container != "web-1" {
		t.Fatal(status, errs, s.asked)
	}
	verbtest.Compare(t, `CONTAINER  NETWORK    DEVICE  DIRECTION  WAY   FAST   SLOW  HIT RATE
web-1      flannel.1  eth0    egress     slow     0  12.3k     0.0 %
web-1      flannel.1  eth0    ingress    peer   999      1    99.9 %
web-1      wg0        eth1    egress     slow     0      0         -
web-1      wg0        eth1    ingress    slow     0      0         -
eth0, egress, is slow: a device of fairlead holds net.ceil=50mbit behind it;
  `+"`fairlead set web-1 net.ceil-`"+` lets it be fast
wg0 is left alone: its packets are encrypted
`, out)
	o.Networks[0].State = api.OverlayOff
	if _, out, _ = overlaid(t, &overlayStub{readings: []api.Overlay{o}}, "web-1", "--total"); !strings.HasSuffix(out, "flannel.1 is off\nwg0 is left alone: its packets are encrypted\nTo turn it on: fairlead set web-1 overlay=on\n") {
		t.Errorf("off: %s", out)
	}
	wg := &o.Containers[0].Ends[1] // both of its directions have the reason of its network
	wg.Egress.Why, wg.Ingress.Why = o.Networks[1].Why, o.Networks[1].Why
	if _, out, _ = overlaid(t, &overlayStub{readings: []api.Overlay{o}}, "web-1", "--total"); strings.Count(out, o.Networks[1].Why) != 1 || !strings.Contains(out, "\neth1 is slow: its packets are encrypted\n") {
		t.Errorf("the same reason three times: %s", out)
	}
	if _, out, _ = overlaid(t, &overlayStub{readings: []api.Overlay{{}}}, "web-1", "--total"); out != "This container is on no overlay network.\n" {
		t.Errorf("none: %s", out)
	}
}

func TestOverlayFlows(t *testing.T) {
	o := api.Overlay{MoreFlows: 7, Flows: []api.OverlayFlow{
		{Network: "flannel.1", Container: 7, Name: "web-1", Protocol: "tcp", Local: "10.244.1.2", LocalPort: 80, Remote: "10.244.2.3", RemotePort: 41000, State: "fast", Age: 0.4},
		{Network: "flannel.1", Container: 8, Protocol: "udp", Local: "fd00::1:2", LocalPort: 53, Remote: "fd00::2:3", RemotePort: 5353, State: api.SlowOtherDirection, Age: 1.25},
	}}
	s := &overlayStub{readings: []api.Overlay{o}}
	status, out, errs := overlaid(t, s, "--flows")
	if status != cli.Done || errs != "" || len(s.asked) != 1 || s.asked[0].Body != (api.OverlayAsk{Flows: api.MaxOverlayFlows}) {
		t.Fatal(status, errs, s.asked)
	}
	verbtest.Compare(t, `CONTAINER  NETWORK    PROTO  LOCAL           REMOTE            STATE            LEASE
web-1      flannel.1  tcp    10.244.1.2:80   10.244.2.3:41000  fast             400ms
id 8       flannel.1  udp    [fd00::1:2]:53  [fd00::2:3]:5353  other_direction  1.25s
and 7 more
`, out)
	if _, out, _ = overlaid(t, &overlayStub{readings: []api.Overlay{{}}}, "--flows"); out != "No flow is known.\n" {
		t.Errorf("none: %s", out)
	}
}

func TestOverlayKill(t *testing.T) {
	s := &overlayStub{readings: []api.Overlay{{Networks: []api.OverlayNetwork{{Network: "flannel.1", State: api.OverlayOn}}}}}
	verbtest.Prints(t, run, s, "flannel.1 is killed: by uid 0 at 2026-11-22T08:30:00Z\n  to end that: fairlead overlay revive flannel.1\n", "overlay", "kill", "flannel.1")
	if status, out, errs := overlaid(t, s, "revive", "flannel.1"); status != cli.Done || out != "flannel.1 is on\n" {
		t.Errorf("revive: %d %s %s", status, out, errs)
	}
	verbtest.Ended(t, cli.Failed, `there is no overlay network "eth0" here`)(overlaid(t, s, "kill", "eth0"))
	verbtest.Ended(t, cli.Failed, "no BTF\n`fairlead doctor`")(verbtest.Against(t, run, refusing{}, "overlay", "--total"))
}

// refusing is an agent with features that have no reports.
type refusing struct{ serve.Backend }

func (refusing) Report(context.Context, api.Ask) (any, error) {
	return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "no BTF"}
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
