// Package report holds the result of an experiment, in the form that every
// `fairlead-lab bench` prints: off and on, round by round, with medians and spread,
// as JSON and as a table.
//
// It measures nothing and knows no experiment; package bench fills it.
package report

import (
	"maps"
	"math"
	"slices"
)

// Report is the result of one experiment. Its JSON form is a stable contract.
type Report struct {
	Bench  string `json:"bench"`
	Env    Env    `json:"env"`
	Rounds int    `json:"rounds"`
	Cases  []Case `json:"cases"`
	// Bars are the outcomes of the bars that the figures were held against; nil
	// if they were held against none.
	Bars []Outcome `json:"bars,omitempty"`
}

// Env says on what machine, and how, the experiment ran.
type Env struct {
	Kernel  string `json:"kernel"`
	CPU     string `json:"cpu"`
	CPUs    int    `json:"cpus"`
	Arch    string `json:"arch"`
	Version string `json:"version"` // of fairlead
	Started string `json:"started"` // RFC 3339
	Quick   bool   `json:"quick"`
	// Notes are what a reader must know to judge the figures.
	Notes []string `json:"notes,omitempty"`
}

// Case is one metric of one case: a value for each round, without the
// protection and with it, measured in turns.
type Case struct {
	Case   string    `json:"case"`
	Metric string    `json:"metric"`
	Unit   string    `json:"unit"` // "1", "1/s", "bit/s" or "s"
	Off    []float64 `json:"off"`
	On     []float64 `json:"on"`
	// Peers are the same with something else in place of the protection, by its
	// name, in the same turns.
	Peers map[string][]float64 `json:"peers,omitempty"`
	// Ratio is the median of On over that of Off; 0 if that is not a number.
	Ratio float64 `json:"ratio"`
}

// Add appends values, one a round, to a case, which is made if it is new. They are of "off", of "on",
// or of a peer.
func (r *Report) Add(name, metric, unit, of string, values ...float64) {
	i := slices.IndexFunc(r.Cases, func(c Case) bool { return c.Case == name && c.Metric == metric })
	if i < 0 {
		i = len(r.Cases)
		r.Cases = append(r.Cases, Case{Case: name, Metric: metric, Unit: unit, Off: []float64{}, On: []float64{}})
	}
	c := &r.Cases[i]
	switch {
	case of == "off":
		c.Off = append(c.Off, values...)
	case of == "on":
		c.On = append(c.On, values...)
	case c.Peers == nil:
		c.Peers = map[string][]float64{of: slices.Clone(values)}
	default:
		c.Peers[of] = append(c.Peers[of], values...)
	}
	c.Ratio = ratio(Median(c.On), Median(c.Off))
}

// peers names all peers of all cases, sorted.
func (r *Report) peers() []string {
	names := make(map[string]bool)
	for _, c := range r.Cases {
		for name := range c.Peers {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

func ratio(a, b float64) float64 {
	if r := a / b; !math.IsNaN(r) && !math.IsInf(r, 0) {
		return r
	}
	return 0
}

// Find returns a case by name and metric, and whether there is one.
func (r *Report) Find(name, metric string) (Case, bool) {
	for _, c := range r.Cases {
		if c.Case == name && c.Metric == metric {
			return c, true
		}
	}
	return Case{}, false
}

// Median is the middle of the values, or the mean of the two middle ones; NaN
// if there are none. It is the 0.5-quantile.
func Median(values []float64) float64 { return Quantile(values, 0.5) }

// Quantile gives the q-quantile, q from 0 to 1, with linear interpolation
// between neighbours (definition 7 of Hyndman and Fan, 1996); NaN if there are
// no values. The values may be in any order, and stay so.
func Quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

// Spread gives the 5 % and 95 % quantiles.
func Spread(values []float64) (low, high float64) {
	return Quantile(values, 0.05), Quantile(values, 0.95)
}
