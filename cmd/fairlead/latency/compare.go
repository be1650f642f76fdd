package latency

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
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

func (x comparison) show(ctx context.Context, e verb.Env, out *cli.Format) (err error) {
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
		return verb.ReadingHint(err)
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
			text += " " + columns.Span(side.of.Taken.Sub(side.of.Since)) + " up to"
		}
		fmt.Fprintf(w, "%s %s\n", text, side.of.Taken.Local().Format("15:04:05"))
	}
	type pair struct {
		a, b      *api.LatencyStage
		direction string
		covered   string
	}
	var pairs []pair
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
					pairs = append(pairs, pair{was, s, b.Direction, lower(a.Coverage, b.Coverage)})
				}
			}
		}
	}
	if len(pairs) == 0 {
		fmt.Fprintln(w, "No stage has packets in both.")
		return
	}
	columns.Print(w, pairs,
		columns.Plain("DIR", func(p pair) string { return p.direction }),
		columns.Plain("STAGE", func(p pair) string { return p.b.Stage }),
		columns.Number("P50 A", func(p pair) string { return fine(p.a.P50) }),
		columns.Number("P50 B", func(p pair) string { return fine(p.b.P50) }),
		columns.Number("B/A", func(p pair) string { return times(p.a.P50, p.b.P50) }),
		columns.Number("P99 A", func(p pair) string { return fine(p.a.P99) }),
		columns.Number("P99 B", func(p pair) string { return fine(p.b.P99) }),
		columns.Number("B/A", func(p pair) string { return times(p.a.P99, p.b.P99) }),
		columns.Number("COVERED", func(p pair) string { return p.covered }),
	)
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
