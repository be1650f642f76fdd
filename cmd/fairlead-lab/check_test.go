package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/bench"
	"github.com/fairlead-project/fairlead/lab/report"
)

// fake is an experiment whose cases give the same figures in each round.
func fake(figures map[string]float64) bench.Experiment {
	only := func(o bench.Options) (names []string, err error) {
		for _, name := range []string{"one", "two", "three"} {
			if ok, err := regexp.MatchString(o.Only, name); ok || err != nil {
				names = append(names, name)
			}
		}
		return names, nil
	}
	return bench.Experiment{
		Name: "fake", Rounds: "2", Window: "1s",
		Cases: only,
		Run: func(_ context.Context, o bench.Options) (*report.Report, error) {
			r := &report.Report{Bench: "fake", Rounds: 2, Env: report.Env{Notes: []string{"a note"}}}
			names, err := only(o)
			for _, name := range names {
				if v, ok := figures[name]; ok {
					r.Add(name, "rate", "bit/s", "on", v)
					r.Add(name, "rate", "bit/s", "on", v)
				}
			}
			return r, err
		},
		Bars: func() []report.Bar {
			return []report.Bar{
				{Case: "one", Metric: "rate", Of: "on", Low: 1e8, High: 2e8, FarLow: 5e7, FarHigh: 3e8, Why: "the first is not held to its rate, which is a sentence that is longer than one line of a terminal"},
				{Case: "two", Metric: "rate", Of: "on", Low: 1e8, High: 2e8, FarLow: 5e7, FarHigh: 3e8, Why: "the second is broken"},
			}
		},
	}
}

func TestCheckFlag(t *testing.T) {
	testkit.NeedRoot(t) // as every experiment does
	const good, bad, far = 1.5e8, 2.5e8, 9e8
	for _, tt := range []struct {
		args         string
		figures      map[string]float64
		status       int
		last, stderr string
	}{
		{"--check", map[string]float64{"one": good, "two": good}, cli.Done, "bars of fake: 2 reached, 0 missed (0 by far), 0 inconclusive", ""},
		{"--check", map[string]float64{"one": good, "two": bad}, cli.Failed, "bars of fake: 1 reached, 1 missed (0 by far), 0 inconclusive", ""},
		{"--check=all", map[string]float64{"one": bad}, cli.Failed, "bars of fake: 0 reached, 1 missed (0 by far), 1 inconclusive", ""},
		{"--check=far", map[string]float64{"one": good, "two": bad}, cli.Done, "bars of fake: 1 reached, 1 missed (0 by far), 0 inconclusive", ""},
		{"--check=far", map[string]float64{"one": far, "two": bad}, cli.Failed, "bars of fake: 0 reached, 2 missed (1 by far), 0 inconclusive", ""},
		{"--check --only one", map[string]float64{"one": good, "two": bad}, cli.Done, "bars of fake: 1 reached, 0 missed (0 by far), 0 inconclusive", ""},
		{"--check --quick", nil, cli.Done, "bars of fake: 0 reached, 0 missed (0 by far), 2 inconclusive", ""},
		{"--check --list", nil, cli.Done, "two", ""},
		{"--check --only three", nil, cli.Usage, "", "none of the chosen cases has a bar"},
		{"--check=some", nil, cli.Usage, "", "must be all or far"},
		{"--check far", nil, cli.Usage, "", "takes no argument"},
	} {
		status, stdout, stderr := runVerb(t, fake(tt.figures), tt.args)
		lines := strings.Split(strings.TrimRight(stdout, "\n"), "\n")
		if status != tt.status || lines[len(lines)-1] != tt.last || !strings.Contains(stderr, tt.stderr) {
			t.Errorf("%s of %v: status %d\n%s%s", tt.args, tt.figures, status, stdout, stderr)
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > 100 {
				t.Errorf("%s: %d columns: %s", tt.args, utf8.RuneCountInString(line), line)
			}
		}
	}
}

// runVerb runs an experiment as a command of its own.
func runVerb(t *testing.T, x bench.Experiment, args string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	e := cli.Env{Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: strings.Fields("bench fake " + args)}
	status = run(t.Context(), e, []bench.Experiment{x})
	return status, out.String(), errs.String()
}

func TestBarsTable(t *testing.T) {
	testkit.NeedRoot(t)
	_, got, _ := runVerb(t, fake(map[string]float64{"one": 9e8}), "--check")
	_, got, _ = strings.Cut(got, "\n\n")
	want := `  METRIC                              BAR                 MEDIAN (SPREAD)               VERDICT
one
  rate, on                            100 to 200 Mbit/s   900 (900 to 900) Mbit/s       fail by far
two
  rate, on                            -                   -                             inconclusive

one, rate, on: fail by far. The first is not held to its rate, which is a sentence that is longer
than one line of a terminal.

two, rate, on: inconclusive. The case was not measured.

Note: a note.

bars of fake: 0 reached, 1 missed (1 by far), 1 inconclusive
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestCheckJSON(t *testing.T) {
	testkit.NeedRoot(t)
	status, out, _ := runVerb(t, fake(map[string]float64{"one": 1.5e8, "two": 2.5e8}), "--check -o json")
	var r report.Report
	must(t, json.Unmarshal([]byte(out), &r))
	if status != cli.Failed || len(r.Cases) != 2 || len(r.Bars) != 2 || r.Bars[0].Verdict != report.Pass || r.Bars[1].Verdict != report.Fail || !slices.Equal(r.Bars[1].Values, []float64{2.5e8, 2.5e8}) {
		t.Errorf("status %d: %s", status, out)
	}
	if _, yaml, _ := runVerb(t, fake(nil), "--check -o yaml"); !strings.Contains(yaml, "\nbars:\n") || !strings.Contains(yaml, "verdict: inconclusive") {
		t.Errorf("got %s", yaml)
	}
	if _, out, _ := runVerb(t, fake(nil), "-o json"); strings.Contains(out, "bars") {
		t.Errorf("there are bars without --check: %s", out)
	}
}

func TestWriteBarsFails(t *testing.T) {
	r, w := io.Pipe()
	r.Close()
	testkit.Fails(t, "nothing can be written, and that is no error", writeBars(&report.Report{}, w))
}
