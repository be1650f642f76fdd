// Package report holds the result of an experiment, as every `fairlead-lab bench`
// prints it: off and on, round by round, with medians and spread, as JSON and as a
// table.
//
// It measures nothing and knows no experiment. Package bench fills it.
package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Report is the result of one experiment. Its JSON form is a stable contract.
type Report struct {
	Bench  string `json:"bench"`
	Env    Env    `json:"env"`
	Rounds int    `json:"rounds"`
	Cases  []Case `json:"cases"`
	// Bars has the outcomes of the bars that figures were compared with; nil: there
	// were no bars.
	Bars []Outcome `json:"bars,omitempty"`
}

// Env describes the machine and the settings of an experiment.
type Env struct {
	Kernel  string `json:"kernel"`
	CPU     string `json:"cpu"`
	CPUs    int    `json:"cpus"`
	Arch    string `json:"arch"`
	Version string `json:"version"` // of fairlead
	Started string `json:"started"` // RFC 3339
	Quick   bool   `json:"quick"`
	// Notes has facts that a reader needs to judge the figures.
	Notes []string `json:"notes,omitempty"`
}

// Case is one metric of one case: a value for each round, without and with the
// protection, measured in turns.
type Case struct {
	Case   string    `json:"case"`
	Metric string    `json:"metric"`
	Unit   string    `json:"unit"` // "1", "1/s", "bit/s" or "s"
	Off    []float64 `json:"off"`
	On     []float64 `json:"on"`
	// Peers has the values with alternatives to the protection, by name, measured in
	// the same turns.
	Peers map[string][]float64 `json:"peers,omitempty"`
	// Ratio is the median of On divided by the median of Off; 0 if that is not a number.
	Ratio float64 `json:"ratio"`
}

// Add appends values, one for each round, to a case. It creates a new case. of is "off", "on" or the
// name of a peer.
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

// peers returns the names of all peers of all cases, sorted.
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

// Quantile returns the q-quantile, q from 0 to 1, with linear interpolation
// between neighbours (definition 7 of Hyndman and Fan, 1996); NaN if there are
// no values. The values may be in any order. Quantile does not change the order.
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

// Spread returns the 5 % and 95 % quantiles.
func Spread(values []float64) (low, high float64) {
	return Quantile(values, 0.05), Quantile(values, 0.95)
}

// Format formats a value in a unit for people: "1.02", "266k/s", "3.41 Gbit/s",
// "15.3 µs".
func Format(value float64, unit string) string {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return "-"
	}
	if unit == "1" {
		return strconv.FormatFloat(value, 'f', 2, 64)
	}
	s := stepOf(value, unit)
	return number(value/s.size) + s.suffix
}

// Range formats a bar's bounds for people: "280 to 295 Mbit/s", "≤ 1.050". It is "-"
// without a measurement, because then there is no unit.
func (o Outcome) Range() string {
	switch {
	case o.Unit == "":
		return "-"
	case o.Low == nil && o.High == nil:
		return "any"
	case o.Low == nil:
		return "≤ " + together("%s", o.Unit, *o.High)
	case o.High == nil:
		return "≥ " + together("%s", o.Unit, *o.Low)
	}
	return together("%s to %s", o.Unit, *o.Low, *o.High)
}

// Figure formats the median of an outcome's values and their spread: "0.501
// (0.499 to 0.503)"; "-" without values.
func (o Outcome) Figure() string {
	if len(o.Values) == 0 {
		return "-"
	}
	low, high := Spread(o.Values)
	return together("%s (%s to %s)", o.Unit, Median(o.Values), low, high)
}

// together formats values in the unit of the largest one, with the unit once at the
// end. Pure numbers have a third decimal: a share of 0.494 misses a bar of 0.495.
func together(format, unit string, values ...float64) string {
	s := stepOf(slices.MaxFunc(values, func(a, b float64) int { return cmp.Compare(math.Abs(a), math.Abs(b)) }), unit)
	var numbers []any
	for _, v := range values {
		n := strconv.FormatFloat(v, 'f', 3, 64)
		if unit != "1" {
			n = number(v / s.size)
		}
		numbers = append(numbers, n)
	}
	return fmt.Sprintf(format, numbers...) + s.suffix
}

type step struct {
	size   float64
	suffix string
}

// stepOf returns the largest multiple of a unit in which a value is at least 1, or
// the smallest multiple.
func stepOf(value float64, unit string) step {
	var steps []step
	none := step{1, " " + unit}
	switch unit {
	case "1":
		return step{1, ""}
	case "s":
		steps = []step{none, {1e-3, " ms"}, {1e-6, " µs"}, {1e-9, " ns"}}
	case "bit/s":
		steps = []step{{1e9, " Gbit/s"}, {1e6, " Mbit/s"}, {1e3, " kbit/s"}, none}
	case "1/s":
		none = step{1, "/s"}
		steps = []step{{1e6, "M/s"}, {1e3, "k/s"}, none}
	default:
		steps = []step{none}
	}
	if value == 0 {
		return none
	}
	for _, s := range steps {
		// A value that would round up to 1000 belongs to the larger step.
		if math.Abs(value) >= 0.9995*s.size {
			return s
		}
	}
	return steps[len(steps)-1]
}

// number formats a value with three digits.
func number(v float64) string {
	decimals := 2
	switch a := math.Abs(v); {
	case a >= 99.95 || v == 0:
		decimals = 0
	case a >= 9.995:
		decimals = 1
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}

// WriteTable writes the report for a terminal: one line for each case and
// metric, with the median of the rounds and, in brackets, from the 5 % to the
// 95 % quantile.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", r.Title())
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	peers := r.peers()
	head := "CASE\tMETRIC\tOFF\t\tON\t\tRATIO"
	for _, p := range peers {
		head += "\t" + strings.ToUpper(p) + "\t"
	}
	fmt.Fprintln(tw, head)
	for _, c := range r.Cases {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%.2f", c.Case, c.Metric,
			Format(Median(c.Off), c.Unit), spread(c.Off, c.Unit),
			Format(Median(c.On), c.Unit), spread(c.On, c.Unit), c.Ratio)
		for _, p := range peers {
			fmt.Fprintf(tw, "\t%s\t%s", Format(Median(c.Peers[p]), c.Unit), spread(c.Peers[p], c.Unit))
		}
		fmt.Fprintln(tw)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, n := range r.Env.Notes {
		fmt.Fprintf(w, "\nNote: %s.", n)
	}
	if len(r.Env.Notes) > 0 {
		fmt.Fprintln(w)
	}
	return nil
}

// Title returns one line that names the experiment and the machine.
func (r *Report) Title() string {
	e := r.Env
	return fmt.Sprintf("%s on Linux %s, %s (%s), fairlead %s, %s", r.Bench, e.Kernel, plural(e.CPUs, "CPU"), e.CPU, e.Version, plural(r.Rounds, "round"))
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

func spread(values []float64, unit string) string {
	if len(values) == 0 {
		return ""
	}
	low, high := Spread(values)
	return "(" + Format(low, unit) + " to " + Format(high, unit) + ")"
}
