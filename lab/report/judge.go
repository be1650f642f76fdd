package report

import (
	"math"
	"slices"
)

// Bar is the range that one figure of an experiment has to reach.
type Bar struct {
	Case   string // Case.Case
	Metric string // Case.Metric
	// Of selects the figure: "on", "off", the name of a peer, or "ratio", which is on
	// divided by off in each round.
	Of string
	// A figure from Low to High, both included, reaches the bar. Either may be
	// infinite.
	Low, High float64
	// A figure outside FarLow to FarHigh misses the bar by far: noise of a shared
	// machine does not explain it.
	FarLow, FarHigh float64
	// Why says in one sentence what is broken if the figure misses the bar.
	Why string
}

// Verdict is how a figure compares with a bar.
type Verdict string

const (
	// Pass means that the whole spread of the rounds reaches the bar.
	Pass Verdict = "pass"
	// Fail means that the whole spread misses the bar.
	Fail Verdict = "fail"
	// FailFar means that the whole spread of each of all repetitions misses the
	// bar by far.
	FailFar Verdict = "fail by far"
	// Inconclusive means that the rounds do not decide. Outcome.Reason says why.
	Inconclusive Verdict = "inconclusive"
)

// Repetitions is the highest number of measurements of a case to decide its bars.
const Repetitions = 3

// Outcome is a bar and its verdict. Its JSON form is a stable contract.
type Outcome struct {
	Case   string `json:"case"`
	Metric string `json:"metric"`
	Of     string `json:"of"`
	Unit   string `json:"unit,omitempty"` // Case.Unit, "1" for a ratio; "" without a measurement
	// Low and High are the bar's bounds; nil: none.
	Low  *float64 `json:"low,omitempty"`
	High *float64 `json:"high,omitempty"`
	// Values has one figure for each round of all repetitions. Rounds that gave
	// no finite number are left out.
	Values      []float64 `json:"values"`
	Repetitions int       `json:"repetitions"`
	Verdict     Verdict   `json:"verdict"`
	Reason      string    `json:"reason,omitempty"` // why the verdict is Inconclusive
	Why         string    `json:"why"`

	// Undecided says that another repetition could change the verdict.
	Undecided bool `json:"-"`
}

// Missed reports whether the figure misses the bar, by far or not.
func (o Outcome) Missed() bool { return o.Verdict == Fail || o.Verdict == FailFar }

// Judge compares the repetitions of an experiment with a bar. A repetition that did
// not measure the bar's case does not count.
func (b Bar) Judge(repetitions []*Report) Outcome {
	o := Outcome{
		Case: b.Case, Metric: b.Metric, Of: b.Of, Low: bound(b.Low), High: bound(b.High), Why: b.Why,
		Values: []float64{}, Verdict: Inconclusive,
	}
	named, far, lost := false, true, false
	for _, r := range repetitions {
		named = named || slices.ContainsFunc(r.Cases, func(c Case) bool { return c.Case == b.Case })
		c, _ := r.Find(b.Case, b.Metric)
		all := b.figures(c)
		if len(all) == 0 {
			continue
		}
		finite := slices.DeleteFunc(slices.Clone(all), func(v float64) bool { return bound(v) == nil })
		o.Unit, o.Values = c.Unit, append(o.Values, finite...)
		if b.Of == "ratio" {
			o.Unit = "1"
		}
		o.Repetitions++
		lost = lost || len(finite) < len(all)
		far = far && misses(all, b.FarLow, b.FarHigh)
	}
	last := o.Repetitions >= Repetitions
	low, high := Spread(o.Values)
	switch {
	case !named:
		o.Reason = "the case was not measured"
	case o.Repetitions == 0:
		o.Reason = "the case gave no such figure"
	case lost:
		o.Reason = "a round gave no finite number"
	case len(o.Values) < 2:
		o.Reason, o.Undecided = "one round has no spread", !last
	case low >= b.Low && high <= b.High:
		o.Verdict = Pass
	case misses(o.Values, b.Low, b.High):
		o.Verdict, o.Undecided = Fail, far && !last
		if far && last {
			o.Verdict = FailFar
		}
	default:
		o.Reason, o.Undecided = "the bar lies within the spread", !last
	}
	return o
}

// figures returns the values of a case that the bar selects, by round.
func (b Bar) figures(c Case) []float64 {
	switch b.Of {
	case "off":
		return c.Off
	case "on":
		return c.On
	case "ratio":
		var all []float64
		for i := range min(len(c.Off), len(c.On)) {
			all = append(all, c.On[i]/c.Off[i])
		}
		return all
	}
	return c.Peers[b.Of]
}

// misses reports whether the whole spread of the values is below low or above high.
func misses(values []float64, low, high float64) bool {
	from, to := Spread(values)
	return to < low || from > high
}

// bound returns a pointer to v, or nil if v is not finite.
func bound(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// Append adds the rounds of another run of the same experiment, and its notes.
func (r *Report) Append(more *Report) {
	for _, c := range more.Cases {
		r.Add(c.Case, c.Metric, c.Unit, "off", c.Off...)
		r.Add(c.Case, c.Metric, c.Unit, "on", c.On...)
		for peer, values := range c.Peers {
			r.Add(c.Case, c.Metric, c.Unit, peer, values...)
		}
	}
	for _, n := range more.Env.Notes {
		if !slices.Contains(r.Env.Notes, n) {
			r.Env.Notes = append(r.Env.Notes, n)
		}
	}
}
