package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestBars checks that every bar names an existing case, and can be reached, missed and missed by far.
func TestBars(t *testing.T) {
	for i, x := range Experiments() {
		if len(x.Bars()) == 0 {
			t.Errorf("%s has no bars", x.Name)
		}
		cases := casesOf(everyPlan()[i])
		for _, b := range x.Bars() {
			of := slices.IndexFunc(cases, func(c armed) bool { return c.name == b.Case })
			if of < 0 {
				t.Errorf("%+v: there is no such case", b)
				continue
			}
			if arms := cases[of].arms; !slices.Contains(arms, arm(b.Of)) && !slices.Contains(arms, armAll) && b.Of != "ratio" && b.Of != "on" {
				t.Errorf("%+v: nothing is measured as %q", b, b.Of)
			}
			if !(b.FarLow <= b.Low && b.Low <= b.High && b.High <= b.FarHigh) || b.Metric == "" || b.Why == "" {
				t.Errorf("%+v: not a bar", b)
			}
		}
	}
	if len(demandMetrics()) == 0 {
		t.Fatal("no metrics")
	}
	for _, b := range NetCPUBars() {
		if !slices.Contains(demandMetrics(), b.Metric) {
			t.Errorf("%+v: netcpu has no such metric", b)
		}
	}
}

// demandMetrics returns the metrics of the cases of netcpu.
func demandMetrics() (all []string) {
	e := &experiment{report: &report.Report{}}
	add := func(su setup, d demand) {
		s := &session{setup: su, bed: bed{rig: &rig.Rig{Boxes: []*sandbox.Box{{}, {Name: "a"}, {Name: "b"}}}}, stopwatch: new(rig.Stopwatch)}
		if !su.alone || su.service != "" {
			s.victim, s.log = &rig.Generator{}, &worklog{read: func() uint64 { return 0 }}
		}
		before, after := reading{net: &api.NetCPU{}, received: make([]load.Reading, 2)}, reading{received: make([]load.Reading, 2)}
		after.net = &api.NetCPU{Taken: time.Unix(1, 0), Softirq: 1, Charged: 1, Accounts: []api.NetCPUAccount{{Name: "a", Receive: 1}, {Name: "b"}}}
		after.net.System.Work = []api.NetCPUWork{{Direction: "receive", Protocol: strings.TrimSuffix(string(d.traffic.Kind), "-rr"), Packets: 1}}
		m := s.between(d, before, after)
		m.work, m.counted, m.said = 1, 1, 0
		e.addRound(su, []demand{d}, map[string]map[arm]sample{d.name: {armOff: m, armOn: m}, "": {armOff: m}})
	}
	for _, kind := range []rig.Kind{rig.UDP, rig.TCP, rig.TCPRR} {
		add(setup{}, demand{name: "idle", traffic: rig.Traffic{Kind: kind}, long: 1})
	}
	add(setup{alone: true}, demand{})                                                        // an idle agent
	add(setup{alone: true, service: rig.Redis}, demand{traffic: rig.Traffic{Kind: rig.UDP}}) // a real server
	for _, c := range e.report.Cases {
		all = append(all, c.Metric)
	}
	return append(all, AccountsCost)
}

// TestCheck checks that a case is measured again while one of its bars is undecided, and no other
// case.
func TestCheck(t *testing.T) {
	bars := []report.Bar{
		{Case: "good", Metric: "m", Of: "on", High: 1, FarHigh: 2},
		{Case: "wide (1+1)", Metric: "m", Of: "on", High: 1, FarHigh: 2},
		{Case: "late", Metric: "m", Of: "on", High: 1, FarHigh: 2},
		{Case: "far", Metric: "m", Of: "on", High: 1, FarHigh: 2},
		{Case: "good", Metric: "m", Of: "off", High: 1, FarHigh: 9},
		{Case: "lost", Metric: "m", Of: "on", High: 1, FarHigh: 2},
	}
	// By case, the rounds of each repetition.
	figures := map[string][][]float64{
		"good":       {{1, 1}},
		"wide (1+1)": {{0, 2}, {0, 2}, {0, 2}},
		"late":       {{1}, {1}},
		"far":        {{5, 5}, {5, 5}, {5, 5}},
	}
	var measured []int
	var said []string
	run := func(_ context.Context, o Options) (*report.Report, error) {
		only := regexp.MustCompile(o.Only)
		r := &report.Report{Rounds: o.Rounds}
		measured = append(measured, 0)
		o.Progress(0, 1, "all")
		for name, repetitions := range figures {
			if only.MatchString(name) {
				measured[len(measured)-1]++
				for _, v := range repetitions[len(measured)-1] {
					r.Add(name, "m", "1", "on", v)
					r.Add(name, "m", "1", "off", 2*v)
				}
			}
		}
		return r, nil
	}
	r, err := Check(t.Context(), Options{Quick: true, Progress: func(_, _ int, what string) { said = append(said, what) }}, bars, run)
	must(t, err)
	var got []string
	for _, o := range r.Bars {
		got = append(got, fmt.Sprintf("%s %s %s %d %d", o.Case, o.Of, o.Verdict, o.Repetitions, len(o.Values)))
	}
	want := []string{"good on pass 1 2", "wide (1+1) on inconclusive 3 6", "late on pass 2 2", "far on fail by far 3 6", "good off fail 1 2", "lost on inconclusive 0 0"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if !slices.Equal(measured, []int{4, 3, 2}) || r.Rounds != 2 || said[2] != "repetition 3, all" {
		t.Errorf("measured %v cases with %d rounds: %q", measured, r.Rounds, said)
	}
	if c, _ := r.Find("far", "m"); len(c.On) != 6 {
		t.Errorf("the report has %v", c.On)
	}

	// Only what misses by far so far can still do so.
	measured = nil
	r, err = Check(t.Context(), Options{Quick: true, Far: true, Progress: func(int, int, string) {}}, bars, run)
	if err != nil || !slices.Equal(measured, []int{4, 1, 1}) || r.Bars[3].Verdict != report.FailFar {
		t.Errorf("measured %v cases: %+v, %v", measured, r, err)
	}

	// Check does not wait for a case that is no longer measured.
	n := 0
	if _, err := Check(t.Context(), Options{}, bars[:1], func(context.Context, Options) (*report.Report, error) {
		r := &report.Report{}
		if n++; n == 1 {
			r.Add("good", "m", "1", "on", 1)
		}
		return r, nil
	}); err != nil || n != report.Repetitions {
		t.Errorf("%d repetitions (%v)", n, err)
	}
	broken := errors.New("broken")
	if _, err := Check(t.Context(), Options{}, bars, func(context.Context, Options) (*report.Report, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}
