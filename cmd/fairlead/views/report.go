package views

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/record"
)

func reportVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "report",
		SuggestFor: []string{"incident", "blame"},
		Short:      "Say who was slowed by whom, from the recording",
		Long: `Say which containers were slowed by their neighbours, by whom, when and by what:
over the last hour, the hour before --at, or the time of a file. It needs no
agent, only its recording.`,
		Example: `  fairlead report
  fairlead report --since 2h --at "10 min ago"
  fairlead report --replay incident.rec -o html > incident.html`,
		Args: cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd, "html")
	since := cmd.Flags().Duration("since", time.Hour, "how long before the end; 0: from the start of the recording")
	at := cmd.Flags().String("at", "", "the end, such as \"10 min ago\" or 14:30; empty: that of the recording")
	return verb.Recorded(e, cmd, func(cmd *cobra.Command, from verb.Recording, _ []string) error {
		r, err := from.Open()
		if err != nil {
			return err
		}
		first, last, err := verb.Window(r, *since, *at)
		if err != nil {
			return err
		}
		h, damaged, err := historyOf(cmd.Context(), r, first, last)
		if err != nil {
			return err
		}
		if damaged > 0 {
			fmt.Fprintf(e.Stderr, "%d parts of the recording are damaged, and do not count\n", damaged)
		}
		if out.Name == "html" {
			return reportPage().Execute(e.Stdout, h)
		}
		return out.Print(e.Stdout, h, func(w io.Writer) { reportTable(w, h) })
	})
}

// historyOf sums up what a recording has from one time to another. Beyond two hours it reads fewer
// frames: they are totals, so what happened between two is exact all the same.
func historyOf(ctx context.Context, r *record.Reader, from, to time.Time) (h api.History, damaged int, err error) {
	var before api.Frame
	every := time.Duration(0)
	if span := to.Sub(from); span > 2*time.Hour {
		every = span / 1000
	}
	for f, err := range r.Frames(ctx, from, to, every) {
		if errors.Is(err, record.ErrDamaged) {
			damaged++
			continue
		}
		if err != nil {
			return h, damaged, err
		}
		if !before.Taken.IsZero() {
			h.AddFrames(before, f)
		}
		before = f
	}
	if h.Seconds == 0 {
		return h, damaged, errors.New("nothing was recorded in that time; `fairlead record` shows from when to when there is something")
	}
	return h.Finish(), damaged, nil
}

// blameText says by what and by whom, in a few words.
func blameText(by []api.HistoryBlame) string {
	if len(by) == 0 {
		return "-"
	}
	who := "the host, or unknown"
	if by[0].Culprit != 0 {
		who = cmp.Or(by[0].Name, api.Ref(by[0].Culprit))
	}
	return by[0].Cause + " of " + who
}

func tenths(part float64) string { return fmt.Sprintf("%.1f %%", 100*part) }

func clockTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.TimeOnly)
}

func reportTable(w io.Writer, h api.History) {
	fmt.Fprintf(w, "%s to %s", h.Since.Local().Format(time.DateTime), h.Taken.Local().Format(time.DateTime))
	if gap := h.Taken.Sub(h.Since).Seconds() - h.Seconds; gap >= 1 {
		fmt.Fprintf(w, ", without %.0f s in which nothing was recorded", gap)
	}
	fmt.Fprint(w, "\n\n")
	columns.Print(w, h.Rows,
		columns.Text("CONTAINER", func(r api.HistoryRow) string { return r.Name }).Cut(24),
		columns.Plain("SLOWED", func(r api.HistoryRow) string { return tenths(r.Slowed) }),
		columns.Plain("WORST", func(r api.HistoryRow) string { return tenths(r.Worst) }),
		columns.Plain("AT", func(r api.HistoryRow) string { return clockTime(r.WorstAt) }),
		columns.Text("MOSTLY BY", func(r api.HistoryRow) string { return blameText(r.By) }).Cut(40),
	)
	if len(h.Moments) == 0 {
		fmt.Fprintln(w, "\nNo container was slowed by 5 % or more.")
		return
	}
	fmt.Fprintln(w, "\nThe worst moments:")
	columns.Print(w, h.Moments,
		columns.Plain("FROM", func(m api.HistoryMoment) string { return clockTime(m.Since) }),
		columns.Plain("TO", func(m api.HistoryMoment) string { return clockTime(m.Taken) }),
		columns.Text("CONTAINER", func(m api.HistoryMoment) string { return m.Name }).Cut(24),
		columns.Plain("SLOWED", func(m api.HistoryMoment) string { return tenths(m.Slowed) }),
		columns.Plain("WORST", func(m api.HistoryMoment) string { return tenths(m.Worst) }),
		columns.Text("MOSTLY BY", func(m api.HistoryMoment) string { return blameText(m.By) }).Cut(40),
	)
}

// reportPage is the report as one page that needs nothing else.
func reportPage() *template.Template {
	return template.Must(template.New("report").Funcs(template.FuncMap{
		"percent": tenths, "clock": clockTime,
		"by":   func(by []api.HistoryBlame) string { return cli.ShowText(blameText(by)) },
		"show": cli.Show,
		"date": func(t time.Time) string { return t.Local().Format(time.DateTime) },
	}).Parse(reportHTML))
}

const reportHTML = `<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fairlead: who was slowed by whom</title>
<style>
:root { color-scheme: light dark; font: 16px/1.4 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
</style>
</head>
<body>
<h1>Who was slowed by whom</h1>
<p>{{date .Since}} to {{date .Taken}}; {{printf "%.0f" .Seconds}} s of that are recorded.</p>
<h2>Containers</h2>
<table>
<thead><tr><th scope="col">Container</th><th scope="col" class="n">Slowed</th><th scope="col" class="n">Worst</th><th scope="col" class="n">At</th><th scope="col">Mostly by</th></tr></thead>
<tbody>
{{range .Rows}}<tr><td>{{show .Name}}</td><td class="n">{{percent .Slowed}}</td><td class="n">{{percent .Worst}}</td><td class="n">{{clock .WorstAt}}</td><td>{{by .By}}</td></tr>
{{end}}</tbody>
</table>
<h2>The worst moments</h2>
{{if .Moments}}<table>
<thead><tr><th scope="col" class="n">From</th><th scope="col" class="n">To</th><th scope="col">Container</th><th scope="col" class="n">Slowed</th><th scope="col" class="n">Worst</th><th scope="col">Mostly by</th></tr></thead>
<tbody>
{{range .Moments}}<tr><td class="n">{{clock .Since}}</td><td class="n">{{clock .Taken}}</td><td>{{show .Name}}</td><td class="n">{{percent .Slowed}}</td><td class="n">{{percent .Worst}}</td><td>{{by .By}}</td></tr>
{{end}}</tbody>
</table>{{else}}<p>No container was slowed by 5 % or more.</p>{{end}}
</body>
</html>
`

func recordVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "record",
		SuggestFor: []string{"recording", "history"},
		Short:      "Show what is recorded, or export a part of it",
		Long: `Show what is recorded: the agent keeps all its reports, every five seconds, in
the directory --record-dir, up to --record-size and --record-age of the agent.
"fairlead report" and "fairlead top --at" look at it. "record export" copies a
part of it into a file. Deleting the directory deletes the recording.`,
		Args: cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd)
	verb.Recorded(e, cmd, func(cmd *cobra.Command, from verb.Recording, _ []string) error {
		r, err := from.Open()
		if err != nil {
			return err
		}
		s, err := r.Stat()
		if err != nil {
			return err
		}
		v := recordStatus{Stat: s}
		if from.Replay == "" {
			if st, err := from.Client.Status(cmd.Context()); err == nil {
				v.Agent = st.Recording
				v.seconds = time.Since(st.Started).Seconds()
			}
		}
		return out.Print(e.Stdout, v, func(w io.Writer) { recordText(w, v) })
	})
	cmd.AddCommand(exportVerb(e))
	return cmd
}

// recordStatus is what fairlead record prints.
type recordStatus struct {
	record.Stat
	Agent *api.Recording `json:"agent,omitempty"` // absent if none answers, or it records nothing

	seconds float64 // since the agent started
}

func recordText(w io.Writer, v recordStatus) {
	if v.Frames == 0 {
		fmt.Fprintln(w, "nothing is recorded yet")
	} else {
		fmt.Fprintf(w, "from     %s\nto       %s\nframes   %d, %.1f kB each\nsize     %.1f MB in %d files\n",
			v.First.Local().Format(time.DateTime), v.Last.Local().Format(time.DateTime), v.Frames, float64(v.Bytes)/float64(v.Frames)/1e3, float64(v.Bytes)/1e6, v.Files)
	}
	if v.Damaged > 0 {
		fmt.Fprintf(w, "damaged  %d files in part\n", v.Damaged)
	}
	switch a := v.Agent; {
	case a == nil:
	case a.Error != "":
		fmt.Fprintf(w, "agent    records nothing now: %s\n", cli.OneLine(a.Error))
	case a.Frames > 0 && v.seconds > 0:
		fmt.Fprintf(w, "cost     %.1f ms of CPU time for each frame, %.3f %% of a CPU\n", a.CPU*1e3/float64(a.Frames), 100*a.CPU/v.seconds)
	}
}

func exportVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export FILE",
		Short: "Copy a part of the recording into one file",
		Long: `Copy a part of the recording into one new file, which --replay of other verbs
reads, on any host. It names every container, with images, labels, addresses and
paths of cgroups. With --anonymous names are replaced ("container-7"), the same
name in the same way, and everything else that is text is left out.`,
		Example: `  fairlead record export --since 1h incident.rec
  fairlead record export --since 1h --at 14:30 --anonymous incident.rec`,
		Args: cli.NArgs(1, 1, "one FILE"),
	}
	since := cmd.Flags().Duration("since", 0, "how long before the end; 0: from the start of the recording")
	at := cmd.Flags().String("at", "", "the end, such as \"10 min ago\" or 14:30; empty: that of the recording")
	hide := cmd.Flags().Bool("anonymous", false, "leave out or replace what says whose host it is")
	return verb.Recorded(e, cmd, func(_ *cobra.Command, from verb.Recording, args []string) error {
		r, err := from.Open()
		if err != nil {
			return err
		}
		c := record.Choice{Anonymous: *hide}
		if c.From, c.To, err = verb.Window(r, *since, *at); err != nil {
			return err
		}
		for _, k := range policy.Schema() {
			c.Words = append(c.Words, "fairlead."+k.Name)
		}
		done, err := export(r, args[0], c)
		if err != nil {
			return err
		}
		fmt.Fprintf(e.Stdout, "%s: %d frames, from %s to %s\n", cli.Show(args[0]), done.Frames, done.First.Local().Format(time.DateTime), done.Last.Local().Format(time.DateTime))
		if done.Damaged > 0 {
			fmt.Fprintf(e.Stdout, "%d parts of the recording are damaged, and are not in it\n", done.Damaged)
		}
		return nil
	})
}

// export writes a file that nobody else may read. It leaves none after an error.
func export(r *record.Reader, path string, c record.Choice) (done record.Exported, err error) {
	out, err := os.OpenFile(filepath.Clean(path), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return done, err
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err != nil {
			os.Remove(path)
		}
	}()
	if done, err = r.Export(out, c); err == nil && done.Frames == 0 {
		err = errors.New("nothing was recorded in that time; `fairlead record` shows from when to when there is something")
	}
	return done, err
}
