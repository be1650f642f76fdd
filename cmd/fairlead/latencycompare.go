package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// comparison compares two containers.
type comparison struct {
	a, b     string // containers
	interval time.Duration
	read     func(ref string) func(context.Context, time.Duration) (api.Latency, error)
	stages   bool
}

// compared holds both readings, as -o json prints them.
type compared struct {
	A api.Latency `json:"a"`
	B api.Latency `json:"b"`
}

func (x comparison) show(ctx context.Context, e cli.Env, out *cli.Format) (err error) {
	var both compared
	// At the same time, so that the other load of the host is the same for both.
	done := make(chan error, 1)
	go func() {
		var err error
		both.A, err = x.read(x.a)(ctx, x.interval)
		done <- err
	}()
	both.B, err = x.read(x.b)(ctx, x.interval)
	if aerr := <-done; aerr != nil {
		err = aerr
	}
	if err != nil {
		return readingHint(err)
	}
	return out.Print(e.Stdout, both, func(w io.Writer) { x.table(w, both) })
}

func (x comparison) table(w io.Writer, both compared) {
	for _, side := range []struct {
		letter, ref string
		of          api.Latency
	}{{"A", x.a, both.A}, {"B", x.b, both.B}} {
		text := side.letter + ": " + cli.Show(side.ref) + ","
		if side.of.Since.IsZero() {
			text += " since first measured, up to"
		} else {
			text += " " + span(side.of.Taken.Sub(side.of.Since)) + " up to"
		}
		fmt.Fprintf(w, "%s %s\n", text, side.of.Taken.Local().Format("15:04:05"))
	}
	columns := []column{{"DIR", 0}, {"STAGE", 0}, {"P50 A", 0}, {"P50 B", 0}, {"B/A", 0}, {"P99 A", 0}, {"P99 B", 0}, {"B/A", 0}, {"COVERED", 0}}
	var rows [][]string
	for _, b := range both.B.Containers {
		stagesB := x.rows(b.LatencyTimes)
		for _, a := range both.A.Containers {
			if a.Direction != b.Direction {
				continue
			}
			stagesA := make(map[string]*api.LatencyStage)
			for _, s := range x.rows(a.LatencyTimes) {
				stagesA[s.Stage] = s
			}
			for _, s := range stagesB {
				if was := stagesA[s.Stage]; was != nil {
					rows = append(rows, []string{b.Direction, s.Stage, fine(was.P50), fine(s.P50), times(was.P50, s.P50), fine(was.P99), fine(s.P99), times(was.P99, s.P99), lower(a.Coverage, b.Coverage)})
				}
			}
		}
	}
	if len(rows) == 0 {
		fmt.Fprintln(w, "No stage has packets in both.")
		return
	}
	right(columns, rows, 2, len(columns)-1)
	table(w, columns, rows)
}

// rows returns what to compare: the sums, and with --stages the stages.
func (x comparison) rows(t api.LatencyTimes) (list []*api.LatencyStage) {
	for _, s := range []*api.LatencyStage{t.Added, t.Stack, t.Local} {
		if s != nil {
			list = append(list, s)
		}
	}
	for i := range t.Stages {
		if x.stages {
			list = append(list, &t.Stages[i])
		}
	}
	return list
}

// lower formats the lower of two coverages.
func lower(a, b api.LatencyCoverage) string {
	of, ok := a.Ratio()
	if with, also := b.Ratio(); !ok || also && with < of {
		return covered(b)
	}
	return covered(a)
}

// times formats the ratio of b to a.
func times(a, b float64) string {
	if a == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", b/a)
}
