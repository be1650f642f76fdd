package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench"
)

func latencyVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "latency [CONTAINER]",
		Short: "Show what this host costs the packets of each container",
		Long: `Show what this host costs the packets of each container that policy has measured
(fairlead.latency=on), or of one: over --interval, or with --total since each was first
measured.

  ADDED     from the container's device to the uplink, or back: the container's own expense
  STACK     from the container's socket to the uplink, or back
  P50 ...   half, 90 %, 99 % of the packets took no longer; MAX is the longest
  COVERAGE  part of the packets that was measured from end to end; packets that were
            passed over by choice, as a CPU had too many, are not in it

--stages shows where the time goes: device, deliver, forward and qdisc on the way out;
gro, forward, qdisc, deliver and socket on the way in.`,
		Example: `  fairlead latency
  fairlead latency web-1 --stages
  fairlead latency trace web-1 --protocol icmp
  fairlead latency run --container web-1 -- ping -c 10 192.0.2.1`,
		Args: nargs(0, 1, "one CONTAINER"),
	}
	var f readingFlags
	f.add(cmd, "show what was counted since each container was first measured")
	stages := cmd.Flags().Bool("stages", false, "show the stages of the way")
	protocols := cmd.Flags().Bool("protocols", false, "show each protocol by itself")
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
			print: func(w io.Writer, l api.Latency) { latencyTable(w, l, ref != "", *stages, *protocols) },
		}.show(cmd.Context(), e, f)
	})
}

func benchLatencyVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "latency",
		Short: "How far round trips from a container are off, raw and corrected, and what measuring costs",
	}
	return experiment{bench.LatencyCases, bench.Latency, bench.LatencyHeadline, bench.LatencyPlots, bench.LatencyBars}.verb(e, cmd, &bench.Options{}, "5, with --quick 2", "2s, with --quick 500ms", func() error { return nil })
}

// latencyTable prints a row for each direction of each container, and sum or stage.
func latencyTable(w io.Writer, l api.Latency, one, stages, protocols bool) {
	if len(l.Containers) == 0 {
		if one {
			fmt.Fprintln(w, "Policy does not have this container's packets measured (fairlead.latency=on).")
		} else {
			fmt.Fprintln(w, "Policy has no container's packets measured (fairlead.latency=on).")
		}
		return
	}
	columns := []column{{"CONTAINER", 24}, {"DIRECTION", 0}, {"STAGE", 0}, {"PACKETS", 0}, {"P50", 0}, {"P90", 0}, {"P99", 0}, {"MAX", 0}, {"COVERAGE", 0}}
	if protocols {
		columns = slices.Insert(columns, 2, column{"PROTOCOL", 0})
	}
	var rows [][]string
	for _, c := range l.Containers {
		name := show(c.Name)
		if c.Name == "" {
			name = "id " + c.Container.String()
		}
		add := func(protocol string, t api.LatencyTimes) {
			head := []string{name, c.Direction}
			if protocols {
				head = append(head, protocol)
			}
			rows = append(rows, latencyRows(head, t, stages)...)
		}
		if !protocols || len(c.Protocols) == 0 {
			add("-", c.LatencyTimes)
			continue
		}
		for _, p := range c.Protocols {
			add(p.Protocol, p.LatencyTimes)
		}
	}
	right(columns, rows, len(columns)-6, len(columns)-1)
	table(w, columns, rows)
	for _, note := range []struct {
		n    uint64
		text string
	}{
		{l.Passed, "times a packet was passed over: a CPU had more than it measures, and chose by chance"},
		{l.Evicted, "packets lost their stamp before it was known whose they were"},
	} {
		if note.n > 0 {
			fmt.Fprintf(w, "%s %s\n", scale(float64(note.n)), note.text)
		}
	}
}

// latencyRows are the rows of one direction: the sums, and the stages if they are
// asked for.
func latencyRows(head []string, t api.LatencyTimes, stages bool) (rows [][]string) {
	coverage := "-"
	if ratio, ok := t.Coverage.Ratio(); ok {
		coverage = fmt.Sprintf("%.4g %%", 100*min(ratio, 1))
	}
	list := []*api.LatencyStage{t.Added, t.Stack, t.Local}
	if stages {
		for i := range t.Stages {
			list = append(list, &t.Stages[i])
		}
	}
	for _, s := range list {
		if s == nil {
			continue
		}
		rows = append(rows, append(slices.Clone(head), s.Stage, scale(float64(s.Packets)), fine(s.P50), fine(s.P90), fine(s.P99), fine(s.Max), coverage))
	}
	if len(rows) == 0 {
		rows = append(rows, append(slices.Clone(head), "-", "0", "-", "-", "-", "-", coverage))
	}
	return rows
}

// fine is brief with tenths of a microsecond.
func fine(sec float64) string {
	if us := sec * 1e6; us < 100 {
		return fmt.Sprintf("%.1fus", us)
	}
	return brief(sec)
}

func latencyTraceVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace CONTAINER",
		Short: "Show a container's packets one by one",
		Long: `Show the packets of a container one by one, with what each took on this host, until
interrupted. Inside a container, to which the agent's self socket was given, --self
shows the container's own. Packets that could not be kept are counted at the end.
With -o json there is one object on each line.`,
		Example: `  fairlead latency trace web-1 --protocol tcp --port 443
  fairlead latency trace --self --slide`,
		Args: nargs(0, 1, "one CONTAINER"),
	}
	var want packets
	want.add(cmd)
	slide := cmd.Flags().Bool("slide", false, "print each packet as MACE does: [seconds] (number) direction: nanoseconds")
	count := cmd.Flags().Uint("count", 0, "end after so many packets; 0: when interrupted")
	asJSON := cmd.Flags().StringP("output", "o", "table", "how to print: table or json")
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if *asJSON != "table" && *asJSON != "json" {
			return usagef("-o %q: it is one of table, json", *asJSON)
		}
		ask, err := want.source(c, args)
		if err != nil {
			return err
		}
		defer ask.close()
		print := latencyLine
		switch {
		case *asJSON == "json":
			print = latencyJSON
		case *slide:
			print = latencySlide
		}
		var missed, shown uint64
		for *count == 0 || shown < uint64(*count) {
			got, err := ask.next(cmd.Context(), time.Second)
			if cmd.Context().Err() != nil {
				break
			}
			if err != nil {
				return readingHint(err)
			}
			missed += got.Missed
			for _, r := range got.Records {
				if *count > 0 && shown == uint64(*count) {
					break
				}
				if err := print(e.stdout, r); err != nil {
					return err
				}
				shown++
			}
		}
		if missed > 0 {
			fmt.Fprintf(e.stderr, "%d packets were overwritten before they were read\n", missed)
		}
		return nil
	})
}

// latencyLine prints a packet for people.
func latencyLine(w io.Writer, r api.LatencyRecord) error {
	end := func(addr string, port int) string {
		switch {
		case port == 0:
			return addr
		case strings.Contains(addr, ":"):
			return fmt.Sprintf("[%s]:%d", addr, port)
		}
		return fmt.Sprintf("%s:%d", addr, port)
	}
	line := fmt.Sprintf("%s %-7s %-5s %s > %s", r.Time.Format("15:04:05.000000"), r.Direction, r.Protocol, end(r.From, r.FromPort), end(r.To, r.ToPort))
	if r.Seq > 0 {
		line += fmt.Sprintf(" seq %d", r.Seq)
	}
	line += fmt.Sprintf(" %d bytes", r.Bytes)
	for _, sum := range []struct {
		name string
		of   *float64
	}{{"added", r.Added}, {"stack", r.Stack}} {
		if sum.of != nil {
			line += fmt.Sprintf("  %s %s", sum.name, fine(*sum.of))
		}
	}
	var parts []string
	for _, p := range r.Stages {
		parts = append(parts, p.Stage+" "+fine(p.Seconds))
	}
	_, err := fmt.Fprintf(w, "%s  (%s)\n", line, strings.Join(parts, ", "))
	return err
}

// latencySlide prints a packet in the form of MACE's slides.
func latencySlide(w io.Writer, r api.LatencyRecord) error {
	of := r.Stack
	if of == nil {
		of = r.Added
	}
	if of == nil {
		return nil
	}
	_, err := fmt.Fprintf(w, "[%d.%06d] (%d) %s: %.0f\n", r.Time.Unix(), r.Time.Nanosecond()/1000, r.Seq, r.Direction, *of*1e9)
	return err
}
