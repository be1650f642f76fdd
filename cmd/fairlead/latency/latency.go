// Package latency contains the verb latency and the verbs below it, which trace packets and
// subtract this host's delay from round trips. The agent measures the packets; main lists the verb.
package latency

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
)

// Verbs returns the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{latencyVerb} }

func latencyVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "latency [CONTAINER]",
		Short: "Show what this host costs the packets of each container",
		Long: `Show what this host costs the packets of each container that policy has measured
(fairlead.latency=on), or of one: over --interval, or with --total since each was first
measured.

  added     between the container's device and the uplink: the container's own expense
  stack     between the container's socket and the uplink
  local     between the devices of two containers of this host
  P50 ...   half, 90 %, 99 % of the packets took no longer; MAX is the longest
  COVERED   the part of the packets that was measured from end to end; packets that a
            busy CPU passed over by choice do not count

--stages shows where the time goes: device, deliver, forward and qdisc on the way out;
gro, forward, qdisc, deliver and socket on the way in. It also shows which other packets
the same CPUs handled meanwhile: a packet in the backlog of a CPU waits for those.`,
		Example: `  fairlead latency
  fairlead latency web-1 --stages
  fairlead latency trace web-1 --protocol icmp
  fairlead latency run --container web-1 -- ping -c 10 192.0.2.1`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	stages := cmd.Flags().Bool("stages", false, "show where the time goes")
	protocols := cmd.Flags().Bool("protocols", false, "show each protocol by itself")
	wide := cmd.Flags().Bool("wide", false, "show the names of containers in full")
	cmd.AddCommand(latencyTraceVerb(e), latencyRunVerb(e), latencyProbeVerb(e))
	return verb.Reads(e, cmd, "show what was counted since each container was first measured", func(c *api.Client, ref string, _ *verb.ReadingFlags) verb.Readings[api.Latency] {
		return verb.Readings[api.Latency]{
			Over:  api.MaxOver,
			Read:  func(ctx context.Context, over time.Duration) (api.Latency, error) { return c.Latency(ctx, ref, over) },
			After: func(now, _ api.Latency) api.Latency { return now },
			Print: func(w io.Writer, l api.Latency) {
				v := latencyView{l, ref != "", *protocols, *wide}
				if *stages {
					v.waterfall(w)
				} else {
					v.table(w)
				}
			},
		}
	})
}

// latencyView is a reading and the options for its display.
type latencyView struct {
	api.Latency
	one, protocols, wide bool
}

// empty reports whether there is nothing to show, and prints why.
func (v latencyView) empty(w io.Writer) bool {
	switch {
	case len(v.Containers) > 0:
		return false
	case v.one:
		fmt.Fprintln(w, "Policy does not have this container's packets measured (fairlead.latency=on).")
	default:
		fmt.Fprintln(w, "Policy has no container's packets measured (fairlead.latency=on).")
	}
	return true
}

// table prints a row for each container, direction and sum of stages.
func (v latencyView) table(w io.Writer) {
	if v.empty(w) {
		return
	}
	type row struct {
		*api.LatencyStage
		of       api.LatencyContainer
		protocol string
		covered  string
	}
	const none = "-"
	var rows []row
	for _, c := range v.Containers {
		v.each(c, func(protocol string, t api.LatencyTimes) {
			sums := slices.DeleteFunc([]*api.LatencyStage{t.Added, t.Stack, t.Local}, func(s *api.LatencyStage) bool { return s == nil })
			if len(sums) == 0 {
				sums = []*api.LatencyStage{{Stage: none}}
			}
			for _, s := range sums {
				rows = append(rows, row{s, c, protocol, covered(t.Coverage)})
			}
		})
	}
	quantile := func(head string, of func(row) float64) columns.Column[row] {
		return columns.Number(head, func(r row) string { return columns.If(r.Stage != none, fine(of(r))) })
	}
	columns.Print(cli.Wide(w, v.wide), rows,
		columns.Plain("CONTAINER", func(r row) string { return columns.Name(r.of.Container, r.of.Name) }).Rest(columns.Line),
		columns.Plain("DIR", func(r row) string { return r.of.Direction }),
		columns.Plain("PROTO", func(r row) string { return r.protocol }).When(v.protocols),
		columns.Plain("SPAN", func(r row) string { return r.Stage }),
		columns.Number("COUNT", func(r row) string { return view.Scale(float64(r.Packets)) }),
		quantile("P50", func(r row) float64 { return r.P50 }),
		quantile("P90", func(r row) float64 { return r.P90 }),
		quantile("P99", func(r row) float64 { return r.P99 }),
		quantile("MAX", func(r row) float64 { return r.Max }),
		columns.Number("COVERED", func(r row) string { return r.covered }),
	)
	v.notes(w)
}

// each calls show with the times of a container: once, or once for each protocol.
func (v latencyView) each(c api.LatencyContainer, show func(protocol string, t api.LatencyTimes)) {
	if !v.protocols || len(c.Protocols) == 0 {
		show("-", c.LatencyTimes)
		return
	}
	for _, p := range c.Protocols {
		show(p.Protocol, p.LatencyTimes)
	}
}

// notes prints what the rows omit.
func (v latencyView) notes(w io.Writer) {
	said := make(map[string]bool)
	for _, c := range v.Containers {
		for _, g := range c.Uncovered {
			note := fmt.Sprintf("%s, %s: no %s: %s", columns.Name(c.Container, c.Name), c.Direction, strings.Join(g.Stages, ", "), g.Why)
			if !said[note] {
				said[note] = true
				columns.Note(w, note)
			}
		}
	}
	if v.Passed > 0 {
		fmt.Fprintf(w, "%s times a packet was passed over: its CPU had more than it measures\n", view.Scale(float64(v.Passed)))
	}
	if v.Evicted > 0 {
		fmt.Fprintf(w, "%s packets lost their stamp before their container was known\n", view.Scale(float64(v.Evicted)))
	}
}

// covered formats the fraction of the packets that was measured from end to end. It never
// rounds up to 100 %.
func covered(c api.LatencyCoverage) string {
	ratio, ok := c.Ratio()
	switch {
	case !ok:
		return "-"
	case ratio >= 1:
		return "100 %"
	}
	return fmt.Sprintf("%.2f %%", math.Floor(ratio*1e4)/100)
}

// fine is brief with a decimal for short times.
func fine(sec float64) string {
	if us := sec * 1e6; us < 100 {
		return fmt.Sprintf("%.1fus", us)
	}
	return view.Brief(sec)
}

// barWidth is the width of the bars, in characters.
const barWidth = 22

// waterfall prints, for each direction of each container, where the time of its packets
// goes: a bar for the mean of each stage, in the order in which packets pass the stages.
func (v latencyView) waterfall(w io.Writer) {
	if v.empty(w) {
		return
	}
	first := true
	for _, c := range v.Containers {
		v.each(c, func(protocol string, t api.LatencyTimes) {
			if !first {
				fmt.Fprintln(w)
			}
			first = false
			title := columns.Name(c.Container, c.Name) + ", " + c.Direction
			if v.protocols {
				title += ", " + protocol
			}
			fmt.Fprintf(w, "%s: %s packets, %s covered\n", title, view.Scale(float64(t.Coverage.Seen)), covered(t.Coverage))
			stageTable(w, c.Direction, t)
		})
		meanwhile(w, c.Meanwhile)
	}
	v.notes(w)
}

// stageTable prints the stages of one direction, and their sums below.
func stageTable(w io.Writer, direction string, t api.LatencyTimes) {
	type row struct {
		api.LatencyStage
		bar string
	}
	var rows []row
	var most uint64 // most packets in a stage: not all packets pass every stage
	for _, s := range t.Stages {
		most = max(most, s.Packets)
	}
	part := func(s api.LatencyStage) float64 { return s.Mean * float64(s.Packets) / float64(max(most, 1)) }
	all := 0.0
	for _, s := range t.Stages {
		all += part(s)
	}
	from, added := 0.0, [2]float64{0, 0} // start and end of the stages in the sum "added"
	for i, s := range t.Stages {
		to := from + part(s)
		rows = append(rows, row{s, bar(from/all, to/all)})
		switch {
		case direction == "egress" && s.Stage == "device":
			added = [2]float64{to, to}
		case direction == "ingress" && s.Stage == "socket":
		case i == 0:
			added = [2]float64{0, to}
		default:
			added[1] = to
		}
		from = to
	}
	if t.Added != nil {
		rows = append(rows, row{*t.Added, bar(added[0]/all, added[1]/all)})
	}
	if t.Stack != nil {
		rows = append(rows, row{*t.Stack, bar(0, all/all)}) // NaN, and so no bar, if no stage took any time
	}
	if t.Local != nil {
		rows = append(rows, row{*t.Local, ""})
	}
	if len(rows) == 0 {
		return
	}
	columns.Print(w, rows,
		columns.Plain("STAGE", func(r row) string { return r.Stage }),
		columns.Plain("WHERE THE MEAN GOES", func(r row) string { return r.bar }),
		columns.Number("MEAN", func(r row) string { return fine(r.Mean) }),
		columns.Number("P50", func(r row) string { return fine(r.P50) }),
		columns.Number("P90", func(r row) string { return fine(r.P90) }),
		columns.Number("P99", func(r row) string { return fine(r.P99) }),
		columns.Number("MAX", func(r row) string { return fine(r.Max) }),
	)
}

// bar draws a bar between two fractions of the width. Any time above 0 has a mark.
func bar(from, to float64) string {
	if !(to > from) {
		return ""
	}
	at := min(int(math.Round(from*barWidth)), barWidth-1)
	return strings.Repeat(" ", at) + strings.Repeat("#", max(1, int(math.Round(to*barWidth))-at))
}

// meanwhile prints the packet work of a container's CPUs.
func meanwhile(w io.Writer, m *api.LatencyMeanwhile) {
	if m == nil {
		return
	}
	const shown = 5
	text := fmt.Sprintf("meanwhile CPU %s worked %.1f %% of the time for its packets", strings.Trim(fmt.Sprint(m.CPUs), "[]"), 100*m.Own)
	for i, n := range m.By {
		if i == shown || n.Share < 0.0005 {
			break
		}
		text += fmt.Sprintf(", %.1f %% for those of %s", 100*n.Share, cli.Cut(columns.Name(n.Container, n.Name), 30))
	}
	for _, line := range cli.Fold(text, cli.Across(w, columns.Line)) {
		fmt.Fprintln(w, line)
	}
}
