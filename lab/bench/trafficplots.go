package bench

import (
	"fmt"
	"strings"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// TrafficPlots returns the plots for a report of Traffic, without the cases that were not
// measured.
func TrafficPlots(r *report.Report, _ Options) []report.Plot {
	modes := []string{"bridge", "overlay", "macvlan", "host"}
	over := func(name string) (g []report.Group) {
		for _, m := range modes {
			g = append(g, report.Group{Label: m, Case: m + " " + name})
		}
		return g
	}
	one := func(label, name string) []report.Group { return []report.Group{{Label: label, Case: name}} }
	plots := []report.Plot{
		{Title: "Share of one connection beside six", Note: "Weights 1 and 1 at 1 Gbit/s: one half is due (CNTC, figures 1a, 7a).", Metric: ShareOf + "one", Ideal: 0.5, Groups: over("6 to 1")},
		{Title: "Share of one connection of twice the weight beside six", Note: "Two thirds are due.", Metric: ShareOf + "one", Ideal: 2. / 3, Groups: over("6 to 1, weights 1 to 2")},
		{Title: "Share of the first in order", Note: "Both have 100 Mbit/s; who is first in order is due the rest: 0.9 (figure 8).", Metric: ShareOf + "one", Ideal: 0.9, Groups: over("priority")},
		{Title: "Request latency beside bulk, 99.9th percentile", Note: "One request at a time, beside six connections (figures 1b, 7b). Less is better.", Metric: P999, Groups: over("requests beside bulk")},
		{Title: "Request latency beside a UDP flood, 99.9th percentile", Note: "Less is better.", Metric: P999, Groups: over("requests beside flood")},
		{Title: "The same beside super-packets of UDP", Note: "Less is better.", Metric: P999, Groups: over("requests beside super-packets")},
		{Title: "Wait of requests at the NIC's queue, 99.9th percentile", Note: "Beside super-packets of UDP: what of it a qdisc can help.", Metric: QueueP999, Groups: over("requests beside super-packets")},
		{Title: "The same requests past all queues, 99.9th percentile", Note: "At the same time on the same CPUs: what of it no qdisc can help.", Metric: AsideP999, Groups: over("requests beside super-packets")},
		{Title: "Who has 300 Mbit/s beside a flood of UDP", Note: "One connection of TCP; with headers 287 Mbit/s of payload are due.", Metric: ReceivedBy + "one", Ideal: 287 * mbit, Groups: over("rate beside flood")},
		{Title: "Most in one second, of a ceil", Note: "UDP as fast as it can be sent, from the first packet on; 1 is due.", Metric: WorstSecond, Ideal: 1, Groups: over("ceil")},
		{Title: "Received in all", Note: "At 1 Gbit/s, headers not counted: what dividing the link costs (figure 11b).", Metric: Total, Groups: append(over("6 to 1"), one("80 to 20", "bridge 80 to 20")...)},
		{Title: "Bulk TCP with nothing to divide", Note: "One container, no bound that is reached (figure 11a).", Metric: Total, Groups: one("bulk", "alone bulk")},
		{Title: "Request latency with nothing to divide", Note: "Median (figure 11a).", Metric: P50, Groups: one("requests", "alone requests")},
	}
	services := func(beside string) (g []report.Group) {
		for _, su := range serving() {
			for _, s := range []rig.Service{rig.Redis, rig.Nginx} {
				label, _ := strings.CutPrefix(su.name, "service")
				g = append(g, report.Group{Label: string(s) + label, Case: su.name + " " + string(s) + " " + beside})
			}
		}
		return g
	}
	for _, beside := range []string{"beside bulk", "beside super-packets"} {
		plots = append(plots,
			report.Plot{Title: "Requests of real servers " + beside, Note: "16 clients at once; 50: with half a CPU.", Metric: Requests, Groups: services(beside)},
			report.Plot{Title: "Their latency " + beside + ", 99th percentile", Note: "Less is better.", Metric: P99, Groups: services(beside)})
	}
	for _, c := range r.Cases {
		if after, ok := strings.CutPrefix(c.Metric, Settling); ok {
			plots = append(plots, report.Plot{
				Title: "Time until the shares are those that are due", Note: c.Case + ", after: " + after + " (figures 9, 10). 2 s: they never were.",
				Metric: c.Metric, Groups: one("", c.Case),
			})
		}
	}
	return measured(r, plots)
}

// measured removes the groups and plots that are not in the report.
func measured(r *report.Report, plots []report.Plot) (shown []report.Plot) {
	for _, p := range plots {
		var groups []report.Group
		for _, g := range p.Groups {
			if _, ok := r.Find(g.Case, p.Metric); ok {
				groups = append(groups, g)
			}
		}
		if p.Groups = groups; len(groups) > 0 {
			shown = append(shown, p)
		}
	}
	return shown
}

// TrafficHeadline returns the result in one sentence, or "" if its case was not measured.
func TrafficHeadline(r *report.Report) string {
	c, ok := r.Find("overlay 6 to 1", ShareOf+"one")
	if !ok {
		return ""
	}
	return fmt.Sprintf("In an overlay one connection beside six gets %.0f %% of the link with nothing done, and %.0f %% with fairlead.",
		100*report.Median(c.Off), 100*report.Median(c.On))
}
