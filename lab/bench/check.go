package bench

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/lab/report"
)

// NetCPUBars are the bars for the figures of NetCPU in its default mode.
func NetCPUBars() []report.Bar { return slices.Concat(netcpuBars(), accountBars(), slowedBars()) }

// Check runs an experiment over the cases that bars name, and judges each bar. It
// measures a case again, up to report.Repetitions times in all, while one of the
// case's bars is undecided: with o.Far whether it is missed by far. The report has the rounds of all repetitions.
func Check(ctx context.Context, o Options, bars []report.Bar, run func(context.Context, Options) (*report.Report, error)) (*report.Report, error) {
	if o.Rounds == 0 && o.Quick {
		o.Rounds = 2 // fewer have no spread
	}
	var repetitions []*report.Report
	var outcomes []report.Outcome
	if progress := o.Progress; progress != nil {
		o.Progress = func(done, total int, what string) {
			progress(done, total, fmt.Sprintf("repetition %d, %s", len(repetitions)+1, what))
		}
	}
	for todo := barCases(bars); len(todo) > 0 && len(repetitions) < report.Repetitions; {
		o.Only = "^(" + strings.Join(todo, "|") + ")$"
		r, err := run(ctx, o)
		if err != nil {
			return nil, err
		}
		repetitions, outcomes = append(repetitions, r), nil
		var undecided []report.Bar
		for _, b := range bars {
			outcome := b.Judge(repetitions)
			if outcome.Undecided && (!o.Far || outcome.Missed()) {
				undecided = append(undecided, b)
			}
			outcomes = append(outcomes, outcome)
		}
		todo = barCases(undecided)
	}
	r := repetitions[0]
	for _, more := range repetitions[1:] {
		r.Append(more)
	}
	r.Bars = outcomes
	return r, nil
}

// barCases returns a regular expression for each case that the bars name.
func barCases(bars []report.Bar) (cases []string) {
	for _, b := range bars {
		if name := regexp.QuoteMeta(b.Case); !slices.Contains(cases, name) {
			cases = append(cases, name)
		}
	}
	return cases
}
