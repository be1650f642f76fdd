// Package traffic has the verb traffic with those below it, and the flags of its feature. Shaping is
// the agent's; main lists its verb.
package traffic

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/view"
)

// Verbs are the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{trafficVerb} }

// Flags adds the agent's flags for the feature.
func Flags(s *pflag.FlagSet, c *agent.FeatureConfig) {
	s.Var(uplinks(&c.Uplinks), "uplink", "a device whose bandwidth is divided, as eth0 or, with its rate, eth0=1gbit; separate several by commas, or repeat the flag; default: all hardware that is up, at the rate that its driver reports")
	s.BoolVar(&c.TrafficDelays, "traffic-delays", false, "always measure how long packets wait in the queues of shaped containers, for the metrics page; each packet then costs some 0.2 us more")
}

func trafficVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "traffic [CONTAINER]",
		SuggestFor: []string{"net", "bandwidth", "network"},
		Short:      "Show what bandwidth each container is due, and what it gets",
		Long: `Show what bandwidth each container is due at the uplinks, and what it gets, for all
containers with such a policy or for one. The command reads the kernel's counters
twice, --interval apart, and shows rates in bit/s. --total shows counts since each
class was made.

  ASKED       what policy says: rate, ceil (<=), weight (w), priority (p), latency
  GUARANTEED  what it would get now if all others wanted everything
  SENT        what it has sent, in bit/s (--total: in bytes)
  BORROWED    the part of its packets that went beyond what is guaranteed
  WAITING     bytes in its queue now
  DROPS       packets for which the queue had no room
  AT CEIL     how often it reached its ceil
  P50 ...     how long sent packets had waited: half, 99 %, 99.9 % of them no longer;
              measured over the interval, or over the last 30 s of a longer one
  DRAIN       where that was not measured: an estimate of how long what waits takes to
              be sent, backlog divided by rate

(others) are the host and all containers without such a policy, together.`,
		Example: `  fairlead traffic
  fairlead traffic web-1 --watch
  fairlead traffic --total -o json`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	return verb.Reads(e, cmd, "show what was counted since each class was made, not rates", func(c *api.Client, ref string, _ *verb.ReadingFlags) verb.Readings[api.Traffic] {
		return verb.Readings[api.Traffic]{
			Over:  api.MaxOver,
			Read:  func(ctx context.Context, over time.Duration) (api.Traffic, error) { return c.Traffic(ctx, ref, over) },
			After: api.Traffic.After,
			Print: func(w io.Writer, t api.Traffic) { trafficTable(w, t, ref != "") },
		}
	})
}

// trafficTable prints a table for each uplink and direction.
func trafficTable(w io.Writer, t api.Traffic, one bool) {
	if len(t.Classes) == 0 {
		if one {
			fmt.Fprintln(w, "No policy sets bandwidth for this container.")
		} else {
			fmt.Fprintln(w, "No policy sets bandwidth for any container.")
		}
		return
	}
	if t.Sharer != "" {
		fmt.Fprintf(w, "Policy of %s, which shares the network of this container:\n\n", cli.Show(t.Sharer))
	}
	for rest, first := t.Classes, true; len(rest) > 0; first = false {
		c := rest[0]
		n := slices.IndexFunc(rest, func(o api.TrafficClass) bool { return o.Uplink != c.Uplink || o.Direction != c.Direction })
		if n < 0 {
			n = len(rest)
		}
		if !first {
			fmt.Fprintln(w)
		}
		way := "from containers"
		if c.Direction == "ingress" {
			way = "to containers"
		}
		link := "rate not known"
		if c.Link > 0 {
			link = view.Bits(float64(c.Link))
		}
		fmt.Fprintf(w, "%s, %s, %s", cli.Show(c.Uplink), way, link)
		if t.Since.IsZero() {
			fmt.Fprintln(w)
		} else {
			fmt.Fprintf(w, "; over %s\n", columns.Span(t.Taken.Sub(t.Since)))
		}
		trafficClasses(w, rest[:n], t)
		rest = rest[n:]
	}
	if m := t.Measured; m != nil && m.Error != "" {
		fmt.Fprintf(w, "\nDelays: %s\n", cli.Show(m.Error))
	} else if m != nil && m.Missed > 0 {
		fmt.Fprintf(w, "\nDelays: %s packets were not measured, because too many waited\n", view.Scale(float64(m.Missed)))
	}
}

// trafficClasses prints some classes of t.
func trafficClasses(w io.Writer, classes []api.TrafficClass, t api.Traffic) {
	// Without a measurement there are delays only if the agent always measures them.
	measured := t.Measured != nil && t.Measured.Error == "" ||
		t.Measured == nil && slices.ContainsFunc(classes, func(c api.TrafficClass) bool { return c.Delay != nil })
	quantile := func(head string, none func(api.TrafficClass) string, of func(*api.TrafficDelay) float64) columns.Column[api.TrafficClass] {
		return columns.Number(head, func(c api.TrafficClass) string {
			if c.Delay == nil || c.Delay.Packets == 0 {
				return none(c)
			}
			return view.Brief(of(c.Delay))
		}).When(measured)
	}
	stuck := func(c api.TrafficClass) string { // no packet left the queue meanwhile
		if c.Delay == nil || c.BacklogPackets == 0 || t.Measured == nil {
			return ""
		}
		return ">" + view.Brief(t.Measured.Seconds)
	}
	nothing := func(api.TrafficClass) string { return "" }
	columns.Print(w, classes,
		columns.Plain("CONTAINER", called).Cut(24),
		columns.Plain("ASKED", func(c api.TrafficClass) string { return askedFor(c.Asked) }),
		columns.Number("GUARANTEED", func(c api.TrafficClass) string {
			return columns.If(c.Guaranteed > 0 || c.Link > 0, view.Bits(float64(c.Guaranteed)))
		}),
		columns.Number("SENT", func(c api.TrafficClass) string {
			if t.Since.IsZero() {
				return view.Scale(float64(c.Bytes)) + "B"
			}
			return view.Bits(c.Achieved)
		}),
		columns.Number("BORROWED", func(c api.TrafficClass) string {
			return columns.If(c.Packets > 0, fmt.Sprintf("%.0f %%", 100*float64(c.Borrowed)/float64(c.Packets)))
		}),
		columns.Number("WAITING", func(c api.TrafficClass) string {
			return columns.If(c.BacklogBytes > 0, view.Scale(float64(c.BacklogBytes))+"B")
		}),
		columns.Number("DROPS", func(c api.TrafficClass) string { return view.Scale(float64(c.Drops)) }),
		columns.Number("AT CEIL", func(c api.TrafficClass) string { return view.Scale(float64(c.Overlimits)) }),
		quantile("P50", stuck, func(d *api.TrafficDelay) float64 { return d.P50 }),
		quantile("P99", nothing, func(d *api.TrafficDelay) float64 { return d.P99 }),
		quantile("P99.9", nothing, func(d *api.TrafficDelay) float64 { return d.P999 }),
		columns.Number("DRAIN", func(c api.TrafficClass) string { return columns.If(c.Drain > 0, view.Brief(c.Drain)) }).When(!measured),
	)
	if note := splitNote(classes); note != "" {
		fmt.Fprintln(w, note)
	}
}

// splitNote describes which classes have their packets split, and which classes that is for.
func splitNote(classes []api.TrafficClass) string {
	var of, whom []string
	size := 0
	for _, c := range classes {
		if c.Split > 0 {
			of, size = append(of, called(c)), c.Split
		}
		if c.Asked != nil && c.Asked.Split {
			whom = append(whom, called(c))
		}
	}
	if size == 0 {
		return ""
	}
	const most = 4
	list := func(names []string) string {
		if len(names) > most {
			return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
		}
		return strings.Join(names, ", ")
	}
	note := fmt.Sprintf("Packets of more than %d bytes are split into frames, of %s", size, list(of))
	if len(whom) > 0 { // empty if the view shows one container only
		note += ", for the latency of " + list(whom)
	}
	return note + "."
}

// called names the owner of a class.
func called(c api.TrafficClass) string {
	if c.Container == 0 {
		return "(others)"
	}
	name := columns.Name(c.Container, c.Name)
	if strings.HasPrefix(name, "(") {
		return fmt.Sprintf("%q", name) // only our own names are in brackets
	}
	return name
}

// askedFor formats the policy of a class briefly.
func askedFor(a *api.TrafficAsked) string {
	if a == nil {
		return "-"
	}
	var parts []string
	if a.Rate > 0 {
		parts = append(parts, policy.FormatRate(a.Rate))
	}
	if a.Ceil > 0 {
		parts = append(parts, "<="+policy.FormatRate(a.Ceil))
	}
	if a.Weight > 0 {
		parts = append(parts, fmt.Sprintf("w%d", a.Weight))
	}
	if a.Priority != nil {
		parts = append(parts, fmt.Sprintf("p%d", *a.Priority))
	}
	if a.Latency > 0 {
		parts = append(parts, view.Brief(a.Latency))
	}
	if a.Split {
		parts = append(parts, "split")
	}
	return cmp.Or(strings.Join(parts, " "), "-")
}

// uplinks is the flag --uplink: devices, each with its rate in bit/s; 0 is unknown.
func uplinks(to *map[string]uint64) verb.Pairs[uint64] {
	parse := func(dev, text string, given bool) (rate uint64, err error) {
		if err := verb.CheckDevice(dev); err != nil || !given {
			return 0, err
		}
		if rate, err = policy.ParseRate(text); err != nil {
			return 0, fmt.Errorf("%s: %w", dev, err)
		}
		if rate == 0 {
			return 0, fmt.Errorf("%s: the rate is 0", dev)
		}
		return rate, nil
	}
	format := func(rate uint64) string { return columns.If(rate > 0, policy.FormatRate(rate)) }
	return verb.Pairs[uint64]{To: to, Form: "device[=rate]", Parse: parse, Format: format}
}
