package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/lab/report"
)

// fakeRig counts how often it was built and removed.
type fakeRig struct {
	built, closed int
	err           error
}

func (r *fakeRig) build(context.Context) error { r.built++; return r.err }
func (r *fakeRig) close() error                { r.closed++; return nil }

// TestRounds checks the order of measurements, what of them is reported, and the number of them
// that is announced.
func TestRounds(t *testing.T) {
	for _, tt := range []struct {
		name    string
		rounds  int // of the series
		inOrder bool
		want    string
	}{
		{"alternating", 0, false, "begin a:off a:on b:on b:off compare a:on a:off b:off b:on compare end"},
		{"in order", 0, true, "begin a:off a:on b:off b:on compare a:off a:on b:off b:on compare end"},
		{"own number", 1, false, "begin a:off a:on b:on b:off compare end"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var did []string
			said := 0
			e := &experiment{report: &report.Report{Rounds: 2}, progress: func(int, int, string) { said++ }}
			note := func(what string) error { did = append(did, what); return nil }
			one := func(name string) armed {
				return armed{name: name, arms: offOn(), measure: func(_ context.Context, a arm) ([]figure, error) {
					return []figure{{Work, "1/s", float64(len(did))}}, note(name + ":" + string(a))
				}}
			}
			r := &fakeRig{}
			p := plan{name: "fake", rigged: r, series: []series{{
				rounds: tt.rounds, inOrder: tt.inOrder, cases: []armed{one("a"), one("b")},
				begin:   func(context.Context) error { return note("begin") },
				compare: func() { note("compare") },
				end:     func() error { return note("end") },
			}}}
			must(t, e.measure(t.Context(), p))
			if got := strings.Join(did, " "); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if said != p.measurements(2) {
				t.Errorf("%d measurements were announced, and %d made", p.measurements(2), said)
			}
			for _, name := range []string{"a", "b"} {
				c, _ := e.report.Find(name, Work)
				if rounds := strings.Count(tt.want, "compare"); len(c.Off) != rounds || len(c.On) != rounds {
					t.Errorf("%s: off %v, on %v", name, c.Off, c.On)
				}
			}
			if r.built != 1 || r.closed != 1 {
				t.Errorf("built %d times, removed %d times", r.built, r.closed)
			}
		})
	}
}

// TestRoundsFail expects the rig to be removed after a failure to build it and to measure, and the
// error to name the case and the arm.
func TestRoundsFail(t *testing.T) {
	broken := errors.New("broken")
	e := &experiment{report: &report.Report{Rounds: 1}}
	fails := []series{{cases: []armed{{name: "a", arms: offOn(), measure: func(_ context.Context, a arm) ([]figure, error) {
		if a == armOn {
			return nil, broken
		}
		return nil, nil
	}}}}}
	r := &fakeRig{}
	if err := e.measure(t.Context(), plan{name: "fake", rigged: r, series: fails}); !errors.Is(err, broken) || !strings.Contains(err.Error(), "a, on") || r.closed != 1 {
		t.Errorf("a failed measurement: %v, removed %d times", err, r.closed)
	}
	r = &fakeRig{err: broken}
	if err := e.measure(t.Context(), plan{name: "fake", rigged: r, series: fails}); !errors.Is(err, broken) || r.closed != 1 {
		t.Errorf("a failed build: %v, removed %d times", err, r.closed)
	}
}

// TestArms checks that peers stay apart from off and on, and that each arm is named once in a case.
func TestArms(t *testing.T) {
	e := &experiment{report: &report.Report{}}
	for _, a := range []arm{armOff, armOn, "tc"} {
		e.add("case", a, figure{Work, "1/s", float64(len(a))})
	}
	c, _ := e.report.Find("case", Work)
	if !slices.Equal(c.Off, []float64{3}) || !slices.Equal(c.On, []float64{2}) || !slices.Equal(c.Peers["tc"], []float64{2}) {
		t.Errorf("%+v", c)
	}
	for _, plans := range everyPlan() {
		for _, c := range casesOf(plans) {
			for i, a := range c.arms {
				if slices.Contains(c.arms[:i], a) {
					t.Errorf("%s: %q is measured twice in a round", c.name, a)
				}
			}
		}
	}
}

// everyPlan returns the plans of each experiment.
func everyPlan() (all [][]plan) {
	for _, plans := range []func(*experiment, Options) []plan{netcpuPlans, trafficPlans, latencyPlans, blockioPlans, overlayPlans} {
		all = append(all, plans(&experiment{report: &report.Report{Rounds: 1}}, Options{}))
	}
	return all
}

// casesOf returns the cases of plans that are listed.
func casesOf(plans []plan) (all []armed) {
	for _, p := range plans {
		for _, s := range p.series {
			for _, c := range s.cases {
				if !c.base {
					all = append(all, c)
				}
			}
		}
	}
	return all
}

// TestChoose selects cases, and keeps the base of those that are left.
func TestChoose(t *testing.T) {
	plans := []plan{
		{name: "first", series: []series{{cases: []armed{{name: "base", base: true}, {name: "a", quick: true}, {name: "b"}}}}},
		{name: "second", series: []series{{cases: []armed{{name: "c"}}}, {cases: []armed{{name: "base", base: true}, {name: "d", quick: true}}}}},
	}
	for _, tt := range []struct {
		o     Options
		names string
		left  int // cases, with bases
	}{
		{Options{}, "a b c d", 6}, {Options{Quick: true}, "a d", 4}, {Options{Only: "^[bc]$"}, "b c", 3}, {Options{Only: "c", Quick: true}, "c", 1},
		{Options{Only: "base"}, "", 0}, {Options{Only: "("}, "", 0},
	} {
		list, names, err := choose(plans, tt.o)
		left := 0
		for _, p := range list {
			for _, s := range p.series {
				left += len(s.cases)
			}
		}
		if strings.Join(names, " ") != tt.names || left != tt.left || (err != nil) != (tt.left == 0) {
			t.Errorf("%+v: %q, %d cases, %v", tt.o, names, left, err)
		}
	}
}

// TestInstalled leaves out the cases that need what this machine does not have, and says so.
func TestInstalled(t *testing.T) {
	lacks := errors.New("no dockerd")
	for i, tt := range []struct {
		missing string // a program
		without int    // cases less
		engine  int    // cases that need a Docker Engine
	}{{"nginx", 31, 0}, {"redis", 6, 1}, {"", 0, 0}, {"postgres", 4, 0}, {"nginx", 2, 10}} {
		plans := everyPlan()[i]
		list, notes := installed(plans, func(program string) bool { return program != tt.missing }, nil)
		if n := len(casesOf(plans)) - len(casesOf(list)); n != tt.without || (len(notes) > 0) != (n > 0) {
			t.Errorf("%d: without %q %d cases are left out, want %d; notes %q", i, tt.missing, n, tt.without, notes)
		}
		list, notes = installed(plans, func(string) bool { return true }, lacks)
		if n := len(casesOf(plans)) - len(casesOf(list)); n != tt.engine || (len(notes) > 0) != (n > 0) {
			t.Errorf("%d: without an engine %d cases are left out, want %d; notes %q", i, n, tt.engine, notes)
		}
	}
}
