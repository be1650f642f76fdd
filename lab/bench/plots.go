package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// NetCPUPlots returns the plots for a report of NetCPU with the same options, without the
// cases that were not measured.
func NetCPUPlots(r *report.Report, o Options) []report.Plot {
	setups := catalogue(o.Docker)
	var plots []report.Plot
	for _, su := range setups {
		plots = append(plots, su.plots()...)
	}
	for _, p := range []struct {
		title, note, metric string
		demands             []demand
		ideal               float64
	}{
		{"Penalty factor of other traffic", "Bulk TCP, and 16 connections of requests and responses.", Penalty, others, 1},
		{"Bulk TCP, bit/s", "What protection costs in super-packets.", Received, others[:1], 0},
		{"Requests per second", "64 bytes, 16 connections.", Requests, others[1:], 0},
		{"Request latency, 99th percentile", "Less is better.", P99, others[1:], 0},
	} {
		plot := report.Plot{Title: p.title, Note: p.note, Metric: p.metric, Ideal: p.ideal}
		for _, su := range setups {
			if path := string(su.cfg.Path); su.title == "" && su.name == path+" 50/50" {
				for _, g := range su.groups(p.demands) {
					g.Label = path + " " + g.Label
					plot.Groups = append(plot.Groups, g)
				}
			}
		}
		plots = append(plots, plot)
	}
	return measured(r, plots)
}

// groups returns a group of bars for each case of a setup.
func (su setup) groups(demands []demand) []report.Group {
	var g []report.Group
	for _, d := range demands {
		g = append(g, report.Group{Label: d.name, Case: su.name + " " + d.name})
	}
	return g
}

// pathNames describe the paths of a packet.
var pathNames = map[rig.Path]string{rig.Hop: "one veth hop", rig.NIC: "NIC, bridge, veth", rig.VXLAN: "NIC, VXLAN, bridge, veth", rig.Docker: "Docker's default bridge",
	rig.Macvlan: "macvlan on the NIC"}

// plots returns the plots of one setup: the penalty, and the result of the traffic.
func (su setup) plots() []report.Plot {
	if su.title == "" { // of pairs
		of := fmt.Sprintf("%s, %.0f/%.0f", pathNames[su.cfg.Path], su.cfg.Containers[0].Quota, su.cfg.Containers[1].Quota)
		return []report.Plot{
			{
				Title:  "Penalty factor: " + of,
				Note:   "How many times longer the victim takes beside UDP of 1400 bytes, by packets per second. 1 is perfect isolation.",
				Metric: Penalty, Ideal: 1, Groups: su.groups(floods),
			},
			{
				Title: "Packets received per second: " + of, Note: "What the receiver's program gets. More is better.",
				Metric: Received, Groups: su.groups(floods),
			},
		}
	}
	var plots []report.Plot
	demands := su.demands
	add := func(note, metric string, ideal float64) {
		// More than six groups of bars are not readable.
		for rest := su.groups(demands); len(rest) > 0; {
			n := (len(rest) + 5) / 6
			n = (len(rest) + n - 1) / n
			plots = append(plots, report.Plot{Title: su.title, Note: note, Metric: metric, Ideal: ideal, Groups: short(rest[:n])})
			rest = rest[n:]
		}
	}
	switch {
	case strings.HasPrefix(su.name, "cost "):
		add("By the agent's accounts. "+pathNames[su.cfg.Path]+".", PacketCost, 0)
	case su.timed:
		add("Softirq time by the accounts over that by a stopwatch. 1 is exact.", OfStopwatch, 1)
	case su.alone && su.settled > 0:
		asks := func(d demand) bool { return d.metric() == Requests }
		demands = slices.DeleteFunc(slices.Clone(su.demands), asks)
		add("Packets received per second. The less it differs the less it costs.", Received, 0)
		demands = slices.DeleteFunc(slices.Clone(su.demands), func(d demand) bool { return !asks(d) })
		add("Requests answered per second. The less it differs the less it costs.", Requests, 0)
	case su.accounts && su.service != "":
		add("Requests answered per second, without an agent and with one. The less it differs the less it costs.", Requests, 0)
	case su.accounts:
		add("Penalty of the victim with accounts kept, and without. The less it differs the less they cost.", Penalty, 0)
	case su.service != "":
		add(fmt.Sprintf("Requests answered per second, with nothing done and with %s. More is better.", su.mode), Requests, 0)
	case su.alone && su.demands[0].traffic.Kind == "":
		add("CPU time of the agent per second: it observes, and it isolates. The less the better.", AgentCPU, 0)
	case su.alone:
		add("Packets received per second: with the whole CPU, and with 35 % of it and protected.", Received, 0)
	case su.demands[0].long > 0:
		add("Part of the CPU that was not idle. It is to be 0.9.", CPUUsed, 0.9)
	default:
		add("Penalty: how many times longer the victim takes than beside neighbours that compute.", Penalty, 1)
	}
	return plots
}

// short removes the words that all labels have in common at the front.
func short(groups []report.Group) []report.Group {
	for len(groups) > 1 {
		word, _, ok := strings.Cut(groups[0].Label, " ")
		for _, g := range groups {
			ok = ok && strings.HasPrefix(g.Label, word+" ")
		}
		if !ok {
			break
		}
		for i := range groups {
			groups[i].Label = groups[i].Label[len(word)+1:]
		}
	}
	return groups
}

// NetCPUHeadline returns the result in one sentence, or "" if its case was not measured.
func NetCPUHeadline(r *report.Report) string {
	for _, path := range []rig.Path{rig.NIC, rig.Docker} {
		if c, ok := r.Find(string(path)+" 50/50 flood", Penalty); ok {
			return fmt.Sprintf("Beside a flood through NIC and bridge the victim takes %.2f times as long with nothing done, and %.2f times with fairlead.",
				report.Median(c.Off), report.Median(c.On))
		}
	}
	return ""
}
