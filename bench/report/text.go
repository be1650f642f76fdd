package report

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Format writes a value in a unit the way a person reads it: "1.02", "266k/s",
// "3.41 Gbit/s", "15.3 µs".
func Format(value float64, unit string) string {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return "-"
	}
	switch unit {
	case "1":
		return strconv.FormatFloat(value, 'f', 2, 64)
	case "s":
		return scaled(value, " ", "s", []step{{1, ""}, {1e-3, "m"}, {1e-6, "µ"}, {1e-9, "n"}})
	case "bit/s":
		return scaled(value, " ", unit, []step{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}, {1, ""}})
	case "1/s":
		return scaled(value, "", "/s", []step{{1e6, "M"}, {1e3, "k"}, {1, ""}})
	}
	return scaled(value, " ", unit, []step{{1, ""}})
}

type step struct {
	size   float64
	prefix string
}

// scaled uses the largest step that leaves at least 1, else the last one, and
// three digits.
func scaled(value float64, gap, unit string, steps []step) string {
	s := steps[len(steps)-1]
	for _, c := range steps {
		// What would be rounded up to 1000 belongs to the larger step.
		if math.Abs(value) >= 0.9995*c.size {
			s = c
			break
		}
	}
	if value == 0 {
		s = step{1, ""}
	}
	v := value / s.size
	decimals := 2
	switch a := math.Abs(v); {
	case a >= 99.95 || v == 0:
		decimals = 0
	case a >= 9.995:
		decimals = 1
	}
	return strconv.FormatFloat(v, 'f', decimals, 64) + gap + s.prefix + unit
}

// WriteTable writes the report for a terminal: one line for each case and
// metric, with the median of the rounds and, in brackets, from the 5 % to the
// 95 % quantile.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s on %s, %s\n\n", r.Bench, r.Env.describe(), plural(r.Rounds, "round"))
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

func (e Env) describe() string {
	return strings.Join([]string{"Linux " + e.Kernel, plural(e.CPUs, "CPU") + " (" + e.CPU + ")", "fairlead " + e.Version}, ", ")
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
