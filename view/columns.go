package view

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// Column is one column of the table of containers, in every view.
type Column struct {
	Key  string // what it is called in flags and links
	Head string
	Help string // what it shows, in a sentence without a full stop
	Text bool   // text, not a number
	// Cell is what the column shows for a row, safe to print.
	Cell func(Row) string
	// Figure is what a plot of the column shows; nil: it has no figure.
	Figure func(api.OverviewRow) float64
	// Plot writes a figure of a plot.
	Plot func(float64) string

	less func(a, b Row) int
}

// The keys of columns that views treat in a way of their own.
const (
	ByName   = "name"
	BySlowed = "slowed"
	ByWhom   = "by"
)

// Columns returns the columns in the order of the views.
func Columns() []Column {
	figure := func(key, head, help string, value func(api.OverviewRow) float64, plot func(float64) string) Column {
		return Column{Key: key, Head: head, Help: help, Figure: value, Plot: plot,
			Cell: func(r Row) string {
				if v := value(r.OverviewRow); v > 0 {
					return plot(v)
				}
				return "-"
			},
			less: func(a, b Row) int { return cmp.Compare(value(b.OverviewRow), value(a.OverviewRow)) }}
	}
	against := func(c Column, bound func(api.OverviewRow) float64) Column {
		c.Cell = func(r Row) string { return of(c.Figure(r.OverviewRow), bound(r.OverviewRow)) }
		return c
	}
	return []Column{
		{Key: ByName, Head: "CONTAINER", Help: "name of the container", Text: true,
			Cell: func(r Row) string { return r.Label() },
			less: func(a, b Row) int { return cmp.Compare(a.Name, b.Name) }},
		figure(BySlowed, "SLOWED", "how much slower it runs because of its neighbours",
			func(r api.OverviewRow) float64 { return r.Slowed }, Percent),
		{Key: ByWhom, Head: "BY", Text: true,
			Help: "who is most to blame for that, and by what: packets (CPU time that went into them), cpu (waits for a CPU), uplink (waits in its queue), disk; +1 is one more reason",
			Cell: func(r Row) string { return Blame(r.By) },
			less: func(a, b Row) int { return cmp.Compare(first(b.By).Slowed, first(a.By).Slowed) }},
		figure("cpu", "CPU", "CPU time that it uses, in percent of one CPU",
			func(r api.OverviewRow) float64 { return r.CPU }, cpu),
		figure("packets", "NET", "CPU time of its packets, wherever that ran, in percent of one CPU",
			func(r api.OverviewRow) float64 { return r.NetworkCPU }, cpu),
		against(figure("out", "OUT/DUE", "what it sends, in bit/s, and the bandwidth that it is guaranteed",
			func(r api.OverviewRow) float64 { return r.Egress.Achieved }, Bits),
			func(r api.OverviewRow) float64 { return float64(r.Egress.Due) }),
		against(figure("in", "IN/DUE", "what it receives, likewise",
			func(r api.OverviewRow) float64 { return r.Ingress.Achieved }, Bits),
			func(r api.OverviewRow) float64 { return float64(r.Ingress.Due) }),
		figure("added", "P99", "latency that the host adds to its packets: 99 % are not delayed longer",
			func(r api.OverviewRow) float64 { return r.Added }, Brief),
		against(figure("iops", "IOPS/RSV", "reads and writes per second, and those that it has reserved",
			func(r api.OverviewRow) float64 { return r.IOPS }, Scale),
			func(r api.OverviewRow) float64 { return r.Reserved }),
		{Key: "force", Head: "IN FORCE", Help: "features that do something for it, with their state where that is not done", Text: true,
			Cell: func(r Row) string { return listed(r.InForce) },
			less: func(a, b Row) int { return cmp.Compare(len(b.InForce), len(a.InForce)) }},
	}
}

func cpu(v float64) string {
	if v < 0.0995 {
		return fmt.Sprintf("%.1f%%", 100*v)
	}
	return fmt.Sprintf("%.0f%%", 100*v)
}

func first(by []api.Slowdown) api.Slowdown {
	if len(by) == 0 {
		return api.Slowdown{}
	}
	return by[0]
}

// Blame names the largest of the slowdowns: "flood: packets".
func Blame(by []api.Slowdown) string {
	if len(by) == 0 {
		return "-"
	}
	text := Neighbour(by[0].Culprit, by[0].Name, by[0].Cause) + ": " + Show(by[0].Cause)
	if len(by) > 1 {
		text += fmt.Sprintf(" +%d", len(by)-1)
	}
	return text
}

// Reasons says by whom and by what a container is slowed, in one line, the largest part first.
func Reasons(by []api.Slowdown) string {
	parts := make([]string, len(by))
	for i, s := range by {
		parts[i] = fmt.Sprintf("%s: %s %s", Neighbour(s.Culprit, s.Name, s.Cause), Show(s.Cause), Percent(s.Slowed))
	}
	return strings.Join(parts, ", ")
}

func listed(list []string) string {
	if len(list) == 0 {
		return "-"
	}
	shown := make([]string, len(list))
	for i, s := range list {
		shown[i] = ShowText(s)
	}
	return strings.Join(shown, ", ")
}
