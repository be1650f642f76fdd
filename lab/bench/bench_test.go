package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	if status, ok := Reexec(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

// clean checks that nothing of this process's rigs is left on the host.
func clean(t *testing.T) {
	t.Helper()
	mine := fmt.Sprintf("fl%d-*", os.Getpid())
	for _, pattern := range []string{"/run/fairlead/rig-" + mine, "/sys/fs/cgroup/*/flsandbox-" + mine, "/sys/fs/cgroup/flsandbox-" + mine} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

func TestGuardTellsWhy(t *testing.T) {
	testkit.NeedRoot(t)
	s := &session{bed: bed{experiment: &experiment{mode: "isolate"}}}
	if err := s.build(t.Context()); err != nil {
		t.Fatal(errors.Join(err, s.close()))
	}
	// Without its agent the session can switch nothing, and reports the agent's end.
	s.guard.process.Kill()
	<-s.guard.process.Done()
	testkit.Fails(t, "protection was switched without an agent", s.protect(t.Context(), true))
	testkit.Fails(t, "the agent was killed, and close", s.close(), "agent")
	clean(t)
}

// TestExperiment runs a small setup and checks the form of its results. The figures are not the
// subject of a test.
func TestExperiment(t *testing.T) {
	testkit.NeedRoot(t)
	e := &experiment{report: &report.Report{Rounds: 2}, mode: "isolate", settle: 20 * time.Millisecond, take: 200 * time.Millisecond}
	var said []string
	e.progress = func(done, total int, what string) { said = append(said, what) }
	su := setup{name: "small", cfg: rig.Config{Path: rig.Hop, Containers: rig.Pair(60, 30)}, demands: []demand{
		{name: "10k", traffic: rig.Traffic{Kind: rig.UDP}, rate: 10_000},
		{name: "tcp", traffic: rig.Traffic{Kind: rig.TCP}, rate: load.Flood},
		{name: "udp-rr", traffic: rig.Traffic{Kind: rig.UDPRR}, rate: load.Flood},
	}}
	must(t, e.measure(t.Context(), e.netcpu(su)))
	var got []string
	for _, c := range e.report.Cases {
		if !accounted(c) {
			got = append(got, c.Case+": "+c.Metric)
		}
		if max(len(c.Off), len(c.On)) > 2 || min(len(c.Off), len(c.On)) < 2 && !accounted(c) {
			t.Errorf("%s %s: %d values off, %d on, in 2 rounds", c.Case, c.Metric, len(c.Off), len(c.On))
		}
		figures(t, c)
	}
	want := []string{
		"small idle: penalty", "small idle: victim work", "small idle: victim CPU",
		"small 10k: penalty", "small 10k: victim work", "small 10k: victim CPU", "small 10k: sent", "small 10k: received",
		"small tcp: penalty", "small tcp: victim work", "small tcp: victim CPU", "small tcp: received",
		"small udp-rr: penalty", "small udp-rr: victim work", "small udp-rr: victim CPU",
		"small udp-rr: requests", "small udp-rr: latency p50", "small udp-rr: latency p99",
		"small: agent CPU",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if len(said) != e.netcpu(su).measurements(2) || len(said) != 2*(3+2*3) || said[0] != "round 1: small idle, off" {
		t.Errorf("progress: %q", said)
	}
	clean(t)
}

// accounted reports whether a case's metric is of the accounts. Those are not in every case, nor in
// each window: a connection may wait for a whole window before it retransmits.
func accounted(c report.Case) bool {
	return slices.Contains([]string{PacketCost, Balance, Slowed, SlowedSaid, SlowedOff}, c.Metric)
}

// figures checks that the measurements of a case are numbers, and not all of them 0.
func figures(t *testing.T, c report.Case) {
	t.Helper()
	most := 0.0
	for _, v := range append(c.Off, c.On...) {
		// A victim may be faster than its base.
		if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 && c.Metric != Slowed && c.Metric != SlowedSaid {
			t.Errorf("%s %s: %v, %v", c.Case, c.Metric, c.Off, c.On)
		}
		most = max(most, v)
	}
	// Some metrics may well be 0 in so short a window.
	if most == 0 && !slices.Contains([]string{AgentCPU, VictimCPU, Slowed, SlowedSaid, SlowedOff}, c.Metric) {
		t.Errorf("%s %s: %v, %v", c.Case, c.Metric, c.Off, c.On)
	}
}

// alone waits until no experiment is under way on this machine, and returns a function that lets
// others begin.
func alone(t *testing.T) (release func()) {
	t.Helper()
	for range 300 {
		release, err := only()
		if err == nil {
			return release
		}
		if !errors.Is(err, ErrBusy) {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
	}
	t.Fatal("the machine is never free of experiments")
	return nil
}

func TestOnlyOne(t *testing.T) {
	release := alone(t)
	testkit.Is(t, "a second experiment", testkit.Err(Experiments()[0].Run(t.Context(), Options{})), ErrBusy)
	if err := Demo(t.Context(), Screen{Writer: io.Discard}, ""); !errors.Is(err, ErrBusy) {
		t.Errorf("a demo beside it gives %v", err)
	}
	release()
	alone(t)()
}

func TestCancel(t *testing.T) {
	testkit.NeedRoot(t)
	alone(t)()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Experiments()[0].Run(ctx, Options{Quick: true, Progress: func(done, _ int, _ string) {
		if done == 4 {
			cancel()
		}
	}})
	testkit.Is(t, "a cancelled experiment", err, context.Canceled)
	clean(t)
}

func TestDemo(t *testing.T) {
	testkit.NeedRoot(t)
	alone(t)()
	var out bytes.Buffer
	err := demo(t.Context(), Screen{Writer: &out}, "dev", 1, 10*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond)
	must(t, err)
	last := out.String()[strings.LastIndex(strings.TrimSpace(out.String()), "\n")+1:]
	if !regexp.MustCompile(`Your victim ran \d+\.\d\d times slower beside the flood; with fairlead \d+\.\d\d times\.`).MatchString(last) {
		t.Errorf("the last line is %q", last)
	}
	clean(t)
}

func TestCharges(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	account := func(seconds float64, packets uint64) api.NetCPUAccount {
		return api.NetCPUAccount{Container: 7, Name: "fl-receiver", Work: []api.NetCPUWork{
			{Direction: "receive", Protocol: "udp", Seconds: seconds, Packets: packets},
			{Direction: "send", Protocol: "udp", Seconds: 5 * seconds, Packets: 9 * packets},
		}}
	}
	system := api.NetCPUAccount{Work: []api.NetCPUWork{{Direction: "receive", Protocol: "encapsulated", Seconds: 0.5, Packets: 100}}}
	before := &api.NetCPU{Since: at, Taken: at.Add(time.Second), Softirq: 1, Thread: 1, Charged: 2, Accounts: []api.NetCPUAccount{account(1, 1000)}}
	after := &api.NetCPU{
		Since: at, Taken: at.Add(3 * time.Second), Softirq: 2, Thread: 2, Charged: 3.9, System: system,
		Accounts: []api.NetCPUAccount{account(2, 2000), {Container: 8, Name: "fl-victim", Stolen: 0.5}},
	}
	// A second for 1000 packets, and half a second for the tunnel.
	got := accountFigures(after.After(*before), rig.Traffic{Kind: rig.UDP})
	if len(got) != 2 || got[0].metric != PacketCost || math.Abs(got[0].value-0.0015) > 1e-12 || got[1].metric != Balance || math.Abs(got[1].value-0.95) > 1e-9 {
		t.Errorf("got %v", got)
	}
	if got := accountFigures(after.After(*before), rig.Traffic{Kind: rig.UDP, Out: true}); len(got) != 1 {
		t.Errorf("of packets that leave: %v", got)
	}
}

// TestQuickIsQuick counts windows: two minutes are little more than 100 short windows.
func TestQuickIsQuick(t *testing.T) {
	windows := 0
	for _, su := range catalogue() {
		of := 0
		for _, d := range su.demands {
			if d.quick {
				of += 2 * max(d.long, 1)
			}
			if d.quick && d.busy > 0 {
				of += 2 // finding the rate, once
			}
		}
		if of > 0 {
			windows += 3 + of
		}
	}
	if windows > 80 {
		t.Errorf("--quick takes two rounds of %d windows", windows)
	}
}

func TestBar(t *testing.T) {
	var s Screen
	for share, want := range map[float64]string{
		-1: "", 0: "", 0.5: strings.Repeat("█", 12), 1: strings.Repeat("█", 24), 7: strings.Repeat("█", 24),
		1.0 / 48: "▌", 1.0/24 + 1.0/192: "█▏",
	} {
		if got := s.bar(share, "31"); got != want {
			t.Errorf("bar(%v) = %q, want %q", share, got, want)
		}
	}
	s.Colour = true
	if got, want := s.bar(1.0/24, "31"), "\x1b[31m█\x1b[0m"; got != want {
		t.Errorf("in colour: %q, want %q", got, want)
	}
}
