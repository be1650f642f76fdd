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

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/bench/rig"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

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
	for _, pattern := range []string{"/run/fairlead/rig-" + mine, "/sys/fs/cgroup/*/fairlead-sandbox/" + mine, "/sys/fs/cgroup/fairlead-sandbox/" + mine} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

func TestGuard(t *testing.T) {
	testkit.NeedRoot(t)
	ctx := t.Context()
	s, err := newSession(ctx, rig.Config{Path: rig.NIC}, time.Millisecond, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	// All that the policy of the receiver can be seen to do from here.
	setting := func() string {
		t.Helper()
		all, err := s.guard.client.Containers(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var of []string
		for _, c := range all {
			for _, p := range c.Policy {
				if p.Key == "fairlead.netcpu" {
					of = append(of, strings.TrimPrefix(c.Name, s.rig.Receiver.Name[:len(s.rig.Receiver.Name)-len("receiver")])+" "+p.Value)
				}
			}
		}
		slices.Sort(of)
		return strings.Join(of, ", ")
	}
	for _, on := range []bool{false, true, true, false, true} {
		if err := s.guard.set(ctx, on); err != nil {
			t.Fatal(err)
		}
		want := "receiver observe, victim observe"
		if on {
			want = "receiver isolate, victim observe"
		}
		if got := setting(); got != want {
			t.Errorf("on %v: policy is %q, want %q", on, got, want)
		}
	}
	if s.guard.missing != "" {
		t.Logf("netcpu is %s", s.guard.missing)
	}
	dir := s.guard.dir
	if err := s.close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left (%v)", dir, err)
	}
	clean(t)
}

func TestGuardTellsWhy(t *testing.T) {
	testkit.NeedRoot(t)
	s, err := newSession(t.Context(), rig.Config{}, time.Millisecond, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	// Without its agent nothing can be switched, and the agent's end is told.
	s.guard.process.Kill()
	<-s.guard.process.Done()
	if err := s.guard.set(t.Context(), true); err == nil {
		t.Error("protection was switched without an agent")
	}
	if err := s.close(); err == nil || !strings.Contains(err.Error(), "agent") {
		t.Errorf("the agent was killed, and close says %v", err)
	}
	clean(t)
}

// TestExperiment runs a small setup and looks at the form of what comes out:
// the figures are not a test's business.
func TestExperiment(t *testing.T) {
	testkit.NeedRoot(t)
	e := &experiment{report: &report.Report{}}
	var said []string
	e.progress = func(done, total int, what string) { said = append(said, what) }
	su := setup{"small", rig.Config{Path: rig.Hop, VictimShare: 60, ReceiverShare: 30}, []demand{
		{"10k", rig.UDP, 10_000},
		{"tcp", rig.TCP, load.Flood},
		{"udp-rr", rig.UDPRR, load.Flood},
	}}
	var foreign float64
	var missing string
	if err := e.run(t.Context(), su, 2, 20*time.Millisecond, 200*time.Millisecond, &foreign, &missing); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range e.report.Cases {
		got = append(got, c.Case+": "+c.Metric)
		if len(c.Off) != 2 || len(c.On) != 2 {
			t.Errorf("%s %s: %d values off, %d on, in 2 rounds", c.Case, c.Metric, len(c.Off), len(c.On))
		}
		for _, v := range append(c.Off, c.On...) {
			if math.IsNaN(v) || math.IsInf(v, 0) || v <= 0 {
				t.Errorf("%s %s: %v, %v", c.Case, c.Metric, c.Off, c.On)
				break
			}
		}
	}
	want := []string{
		"small idle: penalty", "small idle: victim work",
		"small 10k: penalty", "small 10k: victim work", "small 10k: sent", "small 10k: received",
		"small tcp: penalty", "small tcp: victim work", "small tcp: received",
		"small udp-rr: penalty", "small udp-rr: victim work", "small udp-rr: requests", "small udp-rr: latency p50", "small udp-rr: latency p99",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if len(said) != 2*(3+2*3) || said[0] != "round 1: small idle, off" {
		t.Errorf("progress: %q", said)
	}
	clean(t)
}

// alone waits until no experiment is under way on this machine, and returns
// what lets others begin.
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
	if _, err := NetCPU(t.Context(), Options{}); !errors.Is(err, ErrBusy) {
		t.Errorf("a second experiment gives %v", err)
	}
	if _, err := Demo(t.Context(), Screen{Writer: io.Discard}, ""); !errors.Is(err, ErrBusy) {
		t.Errorf("a demo beside it gives %v", err)
	}
	release()
	alone(t)()
}

func TestCancel(t *testing.T) {
	testkit.NeedRoot(t)
	alone(t)()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := NetCPU(ctx, Options{Quick: true, Progress: func(done, _ int, _ string) {
		if done == 4 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled experiment gives %v", err)
	}
	clean(t)
}

func TestDemo(t *testing.T) {
	testkit.NeedRoot(t)
	for _, colour := range []bool{false, true} {
		alone(t)()
		var out bytes.Buffer
		r, err := demo(t.Context(), Screen{&out, colour}, "dev", 1, 10*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		last := out.String()[strings.LastIndex(strings.TrimSpace(out.String()), "\n")+1:]
		if !regexp.MustCompile(`Your victim ran \d+\.\d\d times slower beside the flood; with fairlead \d+\.\d\d times\.`).MatchString(last) {
			t.Errorf("the last line is %q", last)
		}
		if ansi := strings.Contains(out.String(), "\x1b["); ansi != colour {
			t.Errorf("colour %v, ANSI sequences %v", colour, ansi)
		}
		var page bytes.Buffer
		if err := r.WriteHTML(&page, "demo", DemoHeadline(r), DemoPlots()); err != nil || strings.Count(page.String(), "<rect") != 8 {
			t.Errorf("page with %d bars, want 8 (%v)", strings.Count(page.String(), "<rect"), err)
		}
	}
	clean(t)
}

// TestPlots looks that every plot shows cases that the experiment measures.
func TestPlots(t *testing.T) {
	for _, o := range []Options{{}, {Docker: true}} {
		e := &experiment{report: &report.Report{}}
		for _, su := range setups(o.paths()...) {
			for _, d := range su.demands {
				for _, on := range []bool{false, true} {
					e.add(su.name+" "+d.name, d.kind, on, 2, sample{work: 1, sent: 1, received: 1, bits: 1, p50: 1, p99: 1})
				}
			}
		}
		for _, p := range NetCPUPlots(o) {
			if len(p.Groups) == 0 {
				t.Errorf("plot %q is empty", p.Title)
			}
			for _, g := range p.Groups {
				if _, ok := e.report.Find(g.Case, p.Metric); !ok {
					t.Errorf("plot %q: nothing measures the %s of %q", p.Title, p.Metric, g.Case)
				}
			}
		}
		if got, want := NetCPUHeadline(e.report), "2.00 times"; !strings.Contains(got, want) {
			t.Errorf("headline %q does not say %q", got, want)
		}
	}
	if got := NetCPUHeadline(&report.Report{}); got != "" {
		t.Errorf("headline of nothing: %q", got)
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

func TestCPUTimes(t *testing.T) {
	a := parseCPU("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n")
	if a != (cpuTimes{idle: 850, all: 1000}) {
		t.Errorf("got %+v", a)
	}
	// Guest time (the ninth) is in user time already.
	b := parseCPU("cpu  200 0 150 800 50 0 0 0 77 0")
	if b.all != 1200 {
		t.Errorf("got %+v", b)
	}
	if busy := (cpuTimes{idle: 50, all: 200}).busySince(cpuTimes{idle: 0, all: 100}); busy <= 0 {
		t.Errorf("half busy is %v CPUs", busy)
	}
	if busy := a.busySince(a); busy != 0 {
		t.Errorf("no time at all is %v CPUs", busy)
	}
	for _, bad := range []string{"", "cpu", "cpu x y z"} {
		if got := parseCPU(bad); got != (cpuTimes{}) {
			t.Errorf("parseCPU(%q) = %+v", bad, got)
		}
	}
}

func TestNotes(t *testing.T) {
	if n := notes(0.01, ""); len(n) != 0 {
		t.Errorf("notes of a quiet run: %q", n)
	}
	if n := notes(0.5, "unavailable: why."); len(n) != 2 || !strings.HasSuffix(n[0], "unavailable: why") || !strings.Contains(n[1], "50 %") {
		t.Errorf("notes: %q", n)
	}
}

func TestTail(t *testing.T) {
	var l tail
	for i := range 1000 {
		fmt.Fprintf(&l, "line %d\n", i)
	}
	if s := l.String(); len(s) > 4096 || !strings.HasSuffix(s, "line 999") {
		t.Errorf("%d bytes, ending %q", len(s), s[max(0, len(s)-20):])
	}
}
