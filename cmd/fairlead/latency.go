package main

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
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

func latencyVerb(e cli.Env) *cobra.Command {
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
	var f readingFlags
	f.add(cmd, "show what was counted since each container was first measured")
	stages := cmd.Flags().Bool("stages", false, "show where the time goes")
	protocols := cmd.Flags().Bool("protocols", false, "show each protocol by itself")
	wide := cmd.Flags().Bool("wide", false, "show the names of containers in full")
	cmd.AddCommand(latencyTraceVerb(e), latencyRunVerb(e), latencyProbeVerb(e))
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		ref, err := f.check(args)
		if err != nil {
			return err
		}
		return readings[api.Latency]{
			read: func(ctx context.Context, after time.Duration) (api.Latency, error) {
				over := min(after, api.MaxOver)
				if err := wait(ctx, after-over); err != nil {
					return api.Latency{}, err
				}
				return c.Latency(ctx, ref, over)
			},
			after: func(now, _ api.Latency) api.Latency { return now },
			print: func(w io.Writer, l api.Latency) {
				v := latencyView{l, ref != "", *protocols, *wide}
				if *stages {
					v.waterfall(w)
				} else {
					v.table(w)
				}
			},
		}.show(cmd.Context(), e, f)
	})
}

// latencyScreen is the width of latency's tables where no terminal reports its own.
const latencyScreen = 80

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
	columns := []column{{"CONTAINER", 0}, {"DIR", 0}, {"SPAN", 0}, {"COUNT", 0}, {"P50", 0}, {"P90", 0}, {"P99", 0}, {"MAX", 0}, {"COVERED", 0}}
	if v.protocols {
		columns = slices.Insert(columns, 2, column{"PROTO", 0})
	}
	var rows [][]string
	for _, c := range v.Containers {
		v.each(c, func(protocol string, t api.LatencyTimes) {
			head := []string{latencyName(c), c.Direction}
			if v.protocols {
				head = append(head, protocol)
			}
			some := false
			for _, s := range []*api.LatencyStage{t.Added, t.Stack, t.Local} {
				if s != nil {
					some = true
					rows = append(rows, append(slices.Clone(head), s.Stage, scale(float64(s.Packets)), fine(s.P50), fine(s.P90), fine(s.P99), fine(s.Max), covered(t.Coverage)))
				}
			}
			if !some {
				rows = append(rows, append(head, "-", "0", "-", "-", "-", "-", covered(t.Coverage)))
			}
		})
	}
	right(columns, rows, len(columns)-6, len(columns)-1)
	if !v.wide {
		columns[0].max = max(9, cli.Across(w, latencyScreen)-width(columns[1:], tails(rows)))
	}
	table(w, columns, rows)
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

// notes prints what the rows leave out.
func (v latencyView) notes(w io.Writer) {
	said := make(map[string]bool)
	for _, c := range v.Containers {
		for _, g := range c.Uncovered {
			note := fmt.Sprintf("%s, %s: no %s: %s", latencyName(c), c.Direction, strings.Join(g.Stages, ", "), g.Why)
			if !said[note] {
				said[note] = true
				for i, line := range cli.Fold(note, cli.Across(w, latencyScreen)-2) {
					fmt.Fprintf(w, "%s%s\n", strings.Repeat("  ", min(i, 1)), line)
				}
			}
		}
	}
	for _, note := range []struct {
		n    uint64
		text string
	}{
		{v.Passed, "times a packet was passed over: its CPU had more than it measures"},
		{v.Evicted, "packets lost their stamp before their container was known"},
	} {
		if note.n > 0 {
			fmt.Fprintf(w, "%s %s\n", scale(float64(note.n)), note.text)
		}
	}
}

func latencyName(c api.LatencyContainer) string {
	if c.Name == "" {
		return "id " + c.Container.String()
	}
	return cli.Show(c.Name)
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
	return brief(sec)
}

// tails returns rows without their first cells.
func tails(rows [][]string) (out [][]string) {
	for _, r := range rows {
		out = append(out, r[1:])
	}
	return out
}
