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
				return armed{name, offOn(), func(_ context.Context, a arm) ([]figure, error) {
					return []figure{{Work, "1/s", float64(len(did))}}, note(name + ":" + string(a))
				}}
			}
			r := &fakeRig{}
			p := plan{"fake", r, []series{{
				rounds: tt.rounds, inOrder: tt.inOrder, cases: []armed{one("a"), one("b")},
				begin:   func(context.Context) error { return note("begin") },
				compare: func() { note("compare") },
				end:     func() error { return note("end") },
			}}}
			if err := e.measure(t.Context(), p); err != nil {
				t.Fatal(err)
			}
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
	fails := []series{{cases: []armed{{"a", offOn(), func(_ context.Context, a arm) ([]figure, error) {
		if a == armOn {
			return nil, broken
		}
		return nil, nil
	}}}}}
	r := &fakeRig{}
	if err := e.measure(t.Context(), plan{"fake", r, fails}); !errors.Is(err, broken) || !strings.Contains(err.Error(), "a, on") || r.closed != 1 {
		t.Errorf("a failed measurement: %v, removed %d times", err, r.closed)
	}
	r = &fakeRig{err: broken}
	if err := e.measure(t.Context(), plan{"fake", r, fails}); !errors.Is(err, broken) || r.closed != 1 {
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
	check := func(name string, arms []arm) {
		for i, a := range arms {
			if slices.Contains(arms[:i], a) {
				t.Errorf("%s: %q is measured twice in a round", name, a)
			}
		}
	}
	for _, c := range blockioCatalogue() {
		check(c.name, c.arms())
	}
	for _, c := range latencyCatalogue() {
		check(c.name, c.arms())
	}
	for _, su := range overlayCatalogue() {
		check(string(su.path), su.arms())
	}
}
