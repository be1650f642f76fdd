// Package bench holds the experiments of `fairlead bench` and `fairlead demo`:
// it places load in a rig, toggles the protection by policy as a user would,
// and measures in turns, off and on.
//
// It builds no rigs (package rig), generates no load (package load) and draws
// nothing (package report). Only cmd/fairlead and tests call it.
package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// Options are what an experiment is told.
type Options struct {
	Rounds  int    // 0: as many as is usual
	Quick   bool   // within two minutes, and less exact
	Docker  bool   // containers of a Docker Engine in place of sandboxes
	Version string // of fairlead, for the report
	// Progress, if not nil, is called before each measurement with how many
	// are done, how many there will be, and what comes.
	Progress func(done, total int, what string)
}

func (o Options) paths() []rig.Path {
	if o.Docker {
		return []rig.Path{rig.Docker}
	}
	return []rig.Path{rig.Hop, rig.NIC}
}

// The metrics of the netcpu experiment.
const (
	// Penalty is how many times longer the victim takes for its work than
	// beside an idle neighbour (Iron, section 2).
	Penalty  = "penalty"
	Work     = "victim work"
	Sent     = "sent"
	Received = "received"
	Requests = "requests"
	P50      = "latency p50"
	P99      = "latency p99"
)

// load that one case puts on the rig.
type demand struct {
	name string
	kind rig.Traffic
	rate uint64
}

var (
	floods = []demand{
		{"100k", rig.UDP, 100_000},
		{"200k", rig.UDP, 200_000},
		{"400k", rig.UDP, 400_000},
		{"flood", rig.UDP, load.Flood},
		{"overrun", rig.Overrun, load.Flood},
	}
	others = []demand{
		{"tcp", rig.TCP, load.Flood},
		{"udp-rr", rig.UDPRR, load.Flood},
		{"tcp-rr", rig.TCPRR, load.Flood},
	}
)

// setup is a rig and what is to be measured in it.
type setup struct {
	name    string
	cfg     rig.Config
	demands []demand
}

func setups(paths ...rig.Path) []setup {
	var all []setup
	for _, path := range paths {
		all = append(all,
			setup{string(path) + " 50/50", rig.Config{Path: path, VictimShare: 50, ReceiverShare: 50}, append(append([]demand{}, floods...), others...)},
			setup{string(path) + " 80/20", rig.Config{Path: path, VictimShare: 80, ReceiverShare: 20}, floods},
		)
	}
	return all
}

// NetCPU runs the netcpu experiment: what a neighbour's packets cost a victim
// that computes, without protection and with `netcpu: isolate`. It needs root
// and two CPUs. When ctx ends, what was built is removed before it returns.
func NetCPU(ctx context.Context, o Options) (*report.Report, error) {
	warm, take := 300*time.Millisecond, 2*time.Second
	rounds := 5
	if o.Quick {
		warm, take, rounds = 150*time.Millisecond, 400*time.Millisecond, 2
	}
	if o.Rounds > 0 {
		rounds = o.Rounds
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	e := &experiment{
		report:   &report.Report{Bench: "netcpu", Env: environment(o.Version, o.Quick), Rounds: rounds},
		progress: o.Progress,
	}
	all := setups(o.paths()...)
	for _, s := range all {
		e.total += rounds * (3 + 2*len(s.demands))
	}
	var foreign float64
	var missing string
	for _, s := range all {
		err := e.run(ctx, s, rounds, warm, take, &foreign, &missing)
		if err != nil {
			return nil, fmt.Errorf("netcpu experiment, %s: %w", s.name, err)
		}
	}
	e.report.Env.Notes = notes(foreign, missing)
	return e.report, nil
}

type experiment struct {
	report      *report.Report
	progress    func(done, total int, what string)
	done, total int
}

func (e *experiment) say(what string) {
	if e.progress != nil {
		e.progress(e.done, e.total, what)
	}
	e.done++
}

func (e *experiment) run(ctx context.Context, su setup, rounds int, warm, take time.Duration, foreign *float64, missing *string) (err error) {
	s, err := newSession(ctx, su.cfg, warm, take)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for round := range rounds {
		if err := e.round(ctx, s, su, round+1); err != nil {
			return err
		}
	}
	*foreign = max(*foreign, s.foreign)
	*missing = s.guard.missing
	return nil
}

// round measures every case once off and once on. What comes first changes
// from case to case, so that the protection need not be switched for each
// measurement. The base, a victim beside an idle neighbour with nothing done, is
// measured before and after.
func (e *experiment) round(ctx context.Context, s *session, su setup, round int) error {
	take := func(d demand, on bool) (sample, error) {
		e.say(fmt.Sprintf("round %d: %s %s, %s", round, su.name, d.name, map[bool]string{false: "off", true: "on"}[on]))
		return s.measure(ctx, d.kind, d.rate, on)
	}
	idle := demand{name: "idle", kind: rig.UDP}
	measured := make([][2]sample, len(su.demands)+1)
	order := [2]bool{false, true}
	for i, d := range append([]demand{idle}, su.demands...) {
		for _, on := range order {
			m, err := take(d, on)
			if err != nil {
				return err
			}
			measured[i][index(on)] = m
		}
		order[0], order[1] = order[1], order[0]
	}
	last, err := take(idle, false)
	if err != nil {
		return err
	}
	measured[0][0].work = (measured[0][0].work + last.work) / 2
	base := measured[0][0].work
	for _, on := range []bool{false, true} {
		m := measured[0][index(on)]
		e.report.Add(su.name+" idle", Penalty, "1", on, base/m.work)
		e.report.Add(su.name+" idle", Work, "1/s", on, m.work)
	}
	for i, d := range su.demands {
		for _, on := range []bool{false, true} {
			e.add(su.name+" "+d.name, d.kind, on, base, measured[i+1][index(on)])
		}
	}
	return nil
}

func index(on bool) int {
	if on {
		return 1
	}
	return 0
}

func (e *experiment) add(name string, kind rig.Traffic, on bool, base float64, m sample) {
	e.report.Add(name, Penalty, "1", on, base/m.work)
	e.report.Add(name, Work, "1/s", on, m.work)
	switch kind {
	case rig.UDP, rig.Overrun:
		e.report.Add(name, Sent, "1/s", on, m.sent)
		e.report.Add(name, Received, "1/s", on, m.received)
	case rig.TCP:
		e.report.Add(name, Received, "bit/s", on, m.bits)
	default:
		e.report.Add(name, Requests, "1/s", on, m.sent)
		e.report.Add(name, P50, "s", on, m.p50)
		e.report.Add(name, P99, "s", on, m.p99)
	}
}

// NetCPUPlots are the plots of the experiment's page.
func NetCPUPlots(o Options) []report.Plot {
	var plots []report.Plot
	over := func(setup string, demands []demand) []report.Group {
		var g []report.Group
		for _, d := range demands {
			g = append(g, report.Group{Label: d.name, Case: setup + " " + d.name})
		}
		return g
	}
	paths := map[rig.Path]string{rig.Hop: "one veth hop", rig.NIC: "NIC, bridge, veth", rig.Docker: "Docker's default bridge"}
	for _, su := range setups(o.paths()...) {
		plots = append(plots, report.Plot{
			Title: fmt.Sprintf("Penalty factor: %s, %d/%d", paths[su.cfg.Path], su.cfg.VictimShare, su.cfg.ReceiverShare),
			Note:  "How many times longer the victim takes beside UDP of 1400 bytes, by packets per second. 1 is perfect isolation.", Metric: Penalty, Ideal: 1,
			Groups: over(su.name, floods),
		}, report.Plot{
			Title: fmt.Sprintf("Packets received per second: %s, %d/%d", paths[su.cfg.Path], su.cfg.VictimShare, su.cfg.ReceiverShare),
			Note:  "What the receiver's program gets. More is better.", Metric: Received,
			Groups: over(su.name, floods),
		})
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
		for _, path := range o.paths() {
			for _, g := range over(string(path)+" 50/50", p.demands) {
				g.Label = string(path) + " " + g.Label
				plot.Groups = append(plot.Groups, g)
			}
		}
		plots = append(plots, plot)
	}
	return plots
}

// NetCPUHeadline says the result in one sentence.
func NetCPUHeadline(r *report.Report) string {
	for _, path := range []rig.Path{rig.NIC, rig.Docker} {
		if c, ok := r.Find(string(path)+" 50/50 flood", Penalty); ok {
			return fmt.Sprintf("Beside a flood through NIC and bridge the victim takes %.2f times as long with nothing done, and %.2f times with fairlead.",
				report.Median(c.Off), report.Median(c.On))
		}
	}
	return ""
}
