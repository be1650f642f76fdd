package report

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestJudge(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	type rounds map[string][]float64
	tests := []struct {
		name        string
		bar         Bar // Case, Metric and Why are filled in
		repetitions []rounds
		verdict     Verdict
		undecided   bool
		reason      string
	}{
		{"on reaches it", Bar{Of: "on", Low: 0.9, High: 1.1}, []rounds{{"on": {0.9, 1.1, 1}}}, Pass, false, ""},
		{"off reaches it", Bar{Of: "off", Low: 2, High: inf}, []rounds{{"off": {2, 3}, "on": {1, 1}}}, Pass, false, ""},
		{"no lower bound", Bar{Of: "on", Low: -inf, High: 1}, []rounds{{"on": {-7, 1}}}, Pass, false, ""},
		{"a peer reaches it", Bar{Of: "tc", Low: 4, High: 6}, []rounds{{"on": {1, 1}, "tc": {5, 5}}}, Pass, false, ""},
		{"ratio is round by round", Bar{Of: "ratio", Low: 0.5, High: 0.5}, []rounds{{"off": {2, 20, 4}, "on": {1, 10, 2}}}, Pass, false, ""},
		{"ratio has as many rounds as both", Bar{Of: "ratio", Low: 0.5, High: 0.5}, []rounds{{"off": {2, 20}, "on": {1, 10, 2}}}, Pass, false, ""},
		{"ratio to nothing", Bar{Of: "ratio", Low: 0, High: 1}, []rounds{{"off": {2, 0}, "on": {1, 1}}}, Inconclusive, false, "finite"},
		{"not a number", Bar{Of: "on", Low: 0, High: 1}, []rounds{{"on": {1, nan, 1}}}, Inconclusive, false, "finite"},
		{"all infinite", Bar{Of: "on", Low: 0, High: 1}, []rounds{{"on": {inf, inf}}}, Inconclusive, false, "finite"},
		{"nothing", Bar{Of: "on", Low: 0, High: 1}, []rounds{{"on": {}, "off": {1, 1}}}, Inconclusive, false, "no such figure"},
		{"no such peer", Bar{Of: "cni", Low: 0, High: 1}, []rounds{{"on": {1, 1}}}, Inconclusive, false, "no such figure"},
		{"no such case", Bar{Of: "on", Low: 0, High: 1}, []rounds{nil}, Inconclusive, false, "not measured"},

		{"one round is no spread", Bar{Of: "on", Low: 0, High: 1}, []rounds{{"on": {1}}}, Inconclusive, true, "one round"},
		{"one round twice is", Bar{Of: "on", Low: 0, High: 1}, []rounds{{"on": {1}}, {"on": {1}}}, Pass, false, ""},
		{"missed by little", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {1.1, 2}}}, Fail, false, ""},
		{"missed below", Bar{Of: "on", Low: 1, High: 2, FarHigh: 3}, []rounds{{"on": {0.5, 0.9}}}, Fail, false, ""},
		{"within the spread", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {0.9, 1.1}}}, Inconclusive, true, "within the spread"},
		{"within the spread to the end", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {0.9, 1.1}}, {"on": {0.9, 1.1}}, {"on": {0.9, 1.1}}}, Inconclusive, false, "within the spread"},
		{"the bar is narrower than the spread", Bar{Of: "on", Low: 1, High: 1.01, FarHigh: 2}, []rounds{{"on": {0.9, 1.1}}}, Inconclusive, true, "within the spread"},

		{"by far once", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3, 4}}}, Fail, true, ""},
		{"by far twice", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3, 4}}, {"on": {3, 4}}}, Fail, true, ""},
		{"by far each time", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3, 4}}, {"on": {3, 4}}, {"on": {3, 4}}}, FailFar, false, ""},
		{"by far in single rounds", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3}}, {"on": {3}}, {"on": {3}}}, FailFar, false, ""},
		{"by far below", Bar{Of: "on", Low: 2, High: inf, FarLow: 1, FarHigh: inf}, []rounds{{"on": {0, 0}}, {"on": {0, 0}}, {"on": {0, 0}}}, FailFar, false, ""},
		{"by far but for one round", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3, 4}}, {"on": {3, 4}}, {"on": {3, 1.5}}}, Fail, false, ""},
		{"by far and not at all", Bar{Of: "on", Low: 0, High: 1, FarHigh: 2}, []rounds{{"on": {3, 4}}, {"on": {3, 4}}, {"on": {1, 1}}}, Inconclusive, false, "within the spread"},
		{"never by far if nothing is", Bar{Of: "on", Low: 0, High: 1, FarLow: -inf, FarHigh: inf}, []rounds{{"on": {3, 4}}}, Fail, false, ""},
	}
	for _, tt := range tests {
		var all []*Report
		for _, rs := range tt.repetitions {
			r := &Report{}
			for _, of := range []string{"off", "on", "tc"} {
				if len(rs[of]) > 0 {
					r.Add("c", "m", "s", of, rs[of]...)
				}
			}
			all = append(all, r)
		}
		tt.bar.Case, tt.bar.Metric, tt.bar.Why = "c", "m", "w"
		o := tt.bar.Judge(all)
		if o.Verdict != tt.verdict || o.Undecided != tt.undecided || !strings.Contains(o.Reason, tt.reason) || (o.Reason == "") != (tt.reason == "") {
			t.Errorf("%s: %+v", tt.name, o)
		}
		unit := "s"
		if tt.bar.Of == "ratio" {
			unit = "1"
		}
		if len(o.Values) > 0 && o.Unit != unit {
			t.Errorf("%s: in %q, want %q", tt.name, o.Unit, unit)
		}
		if _, err := json.Marshal(o); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestOutcomeForm holds the form that docs/bench.md promises, infinite bounds left out.
func TestOutcomeForm(t *testing.T) {
	r := &Report{}
	r.Add("c", "m", "s", "on", 1)
	r.Add("c", "m", "s", "on", 1.5)
	for want, bar := range map[string]Bar{
		`{"case":"c","metric":"m","of":"on","unit":"s","high":2,"values":[1,1.5],"repetitions":1,"verdict":"pass","why":"w"}`:                                {Of: "on", Low: math.Inf(-1), High: 2},
		`{"case":"c","metric":"m","of":"tc","low":0,"values":[],"repetitions":0,"verdict":"inconclusive","reason":"the case gave no such figure","why":"w"}`: {Of: "tc", High: math.Inf(1)},
	} {
		bar.Case, bar.Metric, bar.Why = "c", "m", "w"
		if got, err := json.Marshal(bar.Judge([]*Report{r})); string(got) != want {
			t.Errorf("got %s (%v), want %s", got, err, want)
		}
	}
}

func TestAppend(t *testing.T) {
	r, more := &Report{}, &Report{}
	r.Add("a", "m", "1", "off", 2)
	more.Add("a", "m", "1", "off", 4)
	more.Add("a", "m", "1", "on", 6)
	more.Add("b", "m", "1", "tc", 5)
	r.Env.Notes, more.Env.Notes = []string{"x"}, []string{"x", "y"}
	r.Append(more)
	a, _ := r.Find("a", "m")
	b, _ := r.Find("b", "m")
	if !slices.Equal(a.Off, []float64{2, 4}) || a.Ratio != 2 || !slices.Equal(b.Peers["tc"], []float64{5}) || !slices.Equal(r.Env.Notes, []string{"x", "y"}) {
		t.Errorf("got %+v, notes %q", r.Cases, r.Env.Notes)
	}
}

func TestOutcomeText(t *testing.T) {
	of := func(v float64) *float64 { return &v }
	for _, tt := range []struct {
		o             Outcome
		bar, measured string
	}{
		{Outcome{Unit: "1", Low: of(0.45), High: of(0.55), Values: []float64{0.494, 0.494}}, "0.450 to 0.550", "0.494 (0.494 to 0.494)"},
		{Outcome{Unit: "bit/s", Low: of(280e6), High: of(1.2e9), Values: []float64{3e8, 3e8}}, "0.28 to 1.20 Gbit/s", "300 (300 to 300) Mbit/s"},
		{Outcome{Unit: "s", High: of(0.002), Values: []float64{1e-5}}, "≤ 2.00 ms", "10.0 (10.0 to 10.0) µs"},
		{Outcome{Unit: "s", Low: of(0), High: of(2), Values: []float64{0, 0}}, "0 to 2.00 s", "0 (0 to 0) s"},
		{Outcome{Unit: "s", Low: of(0), High: of(0.002), Values: []float64{0.0001, 0.0001, 0.004}}, "0 to 2.00 ms", "0.10 (0.10 to 3.61) ms"},
		{Outcome{Unit: "1/s", Low: of(0)}, "≥ 0/s", "-"},
		{Outcome{Unit: "1"}, "any", "-"},
		{Outcome{Low: of(1)}, "-", "-"},
	} {
		if bar, measured := tt.o.Range(), tt.o.Figure(); bar != tt.bar || measured != tt.measured {
			t.Errorf("%+v: %q and %q, want %q and %q", tt.o, bar, measured, tt.bar, tt.measured)
		}
	}
}
