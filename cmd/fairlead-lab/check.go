package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/lab/report"
)

// The values of --check: which misses fail the command; "" is no check.
const (
	checkAll = "all"
	checkFar = "far"
)

func checkFlag(cmd *cobra.Command) *string {
	c := cmd.Flags().String("check", "", "measure the cases that have a bar, and exit with 1 if a figure misses its bar (all), or only if one misses it by far in three repetitions (far)")
	cmd.Flags().Lookup("check").NoOptDefVal = checkAll
	return c
}

// missed reports whether the outcomes fail the command.
func missed(check string, outcomes []report.Outcome) bool {
	return slices.ContainsFunc(outcomes, func(o report.Outcome) bool {
		return o.Verdict == report.FailFar || check != checkFar && o.Missed()
	})
}

// barsOf returns the bars of the named cases, and the names of the cases with a bar.
func barsOf(all []report.Bar, names []string) (bars []report.Bar, cases []string) {
	for _, name := range names {
		n := len(bars)
		for _, b := range all {
			if b.Case == name {
				bars = append(bars, b)
			}
		}
		if len(bars) > n {
			cases = append(cases, name)
		}
	}
	return bars, cases
}

// writeBars prints the outcomes for a terminal of 100 columns: a table by case, a sentence
// for each bar that did not pass, and the number of outcomes of each kind.
func writeBars(r *report.Report, w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", r.Title())
	line := func(metric, bar, figure, verdict string) {
		fmt.Fprintf(w, "  %-34s  %-18s  %-28s  %s\n", cli.Cut(metric, 34), bar, figure, verdict)
	}
	line("METRIC", "BAR", "MEDIAN (SPREAD)", "VERDICT")
	var sentences []string
	var reached, missed, far, undecided int
	for i, o := range r.Bars {
		if i == 0 || o.Case != r.Bars[i-1].Case {
			fmt.Fprintln(w, o.Case)
		}
		line(o.Metric+", "+o.Of, o.Range(), o.Figure(), string(o.Verdict))
		say := o.Why
		switch {
		case o.Verdict == report.Pass:
			reached++
			continue
		case o.Missed():
			missed++
			if o.Verdict == report.FailFar {
				far++
			}
		default:
			undecided++
			say = o.Reason
		}
		sentences = append(sentences, fmt.Sprintf("%s, %s, %s: %s. %s%s.", o.Case, o.Metric, o.Of, o.Verdict, strings.ToUpper(say[:1]), strings.TrimSuffix(say[1:], ".")))
	}
	for _, n := range r.Env.Notes {
		sentences = append(sentences, "Note: "+n+".")
	}
	for _, s := range sentences {
		fmt.Fprintf(w, "\n%s\n", strings.Join(cli.Fold(s, 100), "\n"))
	}
	_, err := fmt.Fprintf(w, "\nbars of %s: %d reached, %d missed (%d by far), %d inconclusive\n", r.Bench, reached, missed, far, undecided)
	return err
}
