package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the overlay experiment, in addition to those of netcpu.
const (
	// OfHost is the rate of a round divided by that of host networking in the same round.
	OfHost = "of host networking"
	// RequestCPU is the CPU time of both hosts for one request, by proc_stat(5), and ByteCPU
	// that for one byte.
	RequestCPU = "CPU per request"
	ByteCPU    = "CPU per byte"
	// RequestCharged and ByteCharged are the CPU time of receiving and sending in the accounts of
	// an agent. They cover both hosts, which are one machine.
	RequestCharged = "accounted per request"
	ByteCharged    = "accounted per byte"
	// AgentMaps is the memory of the BPF maps of one agent.
	AgentMaps = "agent maps"
	// StalledFlows is how many flows got no answer for a second.
	StalledFlows = "stalled flows"
)

// The arms of the overlay experiment, beside armOff and armOn.
const (
	armHost   arm = "host"   // the same load between the hosts' own addresses
	armRecipe arm = "recipe" // the cache as the paper describes it; see rig.Recipe
	// Off, but no agent runs. In all other arms two agents run. Each keeps accounts of the packets
	// of both hosts, which are one machine.
	armNone arm = "no agent"
)

// OverlayCases returns the names of the cases that Overlay would measure. Error: ErrNoCase.
func OverlayCases(o Options) ([]string, error) {
	_, names, err := o.overlaySetups()
	return names, err
}

func (o Options) overlaySetups() ([]overlaySetup, []string, error) {
	return choose(o, overlayCatalogue(), func(su *overlaySetup, chosen func(string, bool) bool) bool {
		su.cases = slices.DeleteFunc(su.cases, func(c overlayCase) bool { return !chosen(su.caseName(c), c.quick) })
		return len(su.cases) > 0
	})
}

// Overlay runs the overlay experiment: containers of two hosts that talk over an overlay
// network, without and with the short path, against host networking over the same wire. It
// needs root and two CPUs. When ctx ends, Overlay removes the rig before it returns.
func Overlay(ctx context.Context, o Options) (*report.Report, error) {
	e := o.experiment("overlay",
		usual{rounds: 3, settle: 300 * time.Millisecond, take: 1500 * time.Millisecond},
		usual{rounds: 2, settle: 200 * time.Millisecond, take: time.Second})
	all, _, err := o.overlaySetups()
	if err != nil {
		return nil, err
	}
	noEngine := rig.EngineRuns()
	all, absent := overlayInstalled(all, onMachine, noEngine)
	e.notes = append(e.notes, absent...)
	if len(all) == 0 && noEngine != nil {
		return nil, fmt.Errorf("overlay experiment: %w", noEngine)
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	for _, su := range all {
		e.total += e.report.Rounds * len(su.cases) * len(su.arms(e.report.Env.Quick))
	}
	for _, su := range all {
		if err := e.overlay(ctx, su); err != nil {
			return nil, fmt.Errorf("overlay experiment, %s: %w", su.path, err)
		}
	}
	e.report.Env.Notes = e.notes
	return e.report, nil
}

// overlay measures the cases of one rig, with each arm once in each round. The order of the
// arms alternates.
func (e *experiment) overlay(ctx context.Context, su overlaySetup) (err error) {
	s, err := newOverlaySession(ctx, su, e.settle, e.take)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, c := range su.cases {
		if err := s.begin(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		arms := su.arms(e.report.Env.Quick)
		slices.Reverse(arms)
		for round := range e.report.Rounds {
			slices.Reverse(arms)
			rates := make(map[arm]float64)
			for _, a := range arms {
				e.say(fmt.Sprintf("round %d: %s, %s", round+1, su.caseName(c), a))
				if s.missing != "" && a == armOn {
					continue
				}
				figures, err := s.measure(ctx, c, a)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, a, err)
				}
				rates[a] = figures[0].value
				for _, f := range figures {
					e.addArm(su.caseName(c), a, f)
				}
			}
			for _, a := range []arm{armOff, armOn, armRecipe} {
				if rate, ok := rates[a]; ok && rates[armHost] > 0 {
					e.addArm(su.caseName(c), a, figure{OfHost, "1", rate / rates[armHost]})
				}
			}
		}
		if err := s.end(); err != nil {
			return err
		}
	}
	if s.missing != "" {
		e.notes = append(e.notes, "fairlead had no effect: overlay is "+s.missing)
	}
	return nil
}

// addArm adds a figure of one arm to the report.
func (e *experiment) addArm(name string, a arm, f figure) {
	switch a {
	case armOff, armOn:
		e.report.Add(name, f.metric, f.unit, a == armOn, f.value)
	default:
		e.report.AddPeer(name, f.metric, f.unit, string(a), f.value)
	}
}

// OverlayHeadline returns the result in one sentence.
func OverlayHeadline(r *report.Report) string {
	for _, path := range overlayPaths {
		if c, ok := r.Find(string(path)+" tcp rr 1", Requests); ok && len(c.On) > 0 {
			return fmt.Sprintf("Over an overlay network, one connection makes %.0f requests a second in place of %.0f", report.Median(c.On), report.Median(c.Off))
		}
	}
	return "Containers of two hosts that talk over an overlay network"
}

// OverlayPlots returns the plots for a report of Overlay.
func OverlayPlots(r *report.Report, _ Options) []report.Plot {
	var plots []report.Plot
	for _, su := range overlayCatalogue() {
		requests := report.Plot{
			Title: "Requests per second, " + string(su.path), Metric: Requests,
			Note: "One byte each way, by protocol and number of flows, and real servers.",
		}
		host := report.Plot{Title: "Of host networking, " + string(su.path), Metric: OfHost, Ideal: 1}
		spent := report.Plot{Title: "CPU time per request, " + string(su.path), Metric: RequestCPU, Note: "Of both hosts. Less is better."}
		bulk := report.Plot{Title: "Throughput, bit/s, " + string(su.path), Metric: Received}
		for _, c := range su.cases {
			g := report.Group{Label: c.name, Case: su.caseName(c)}
			host.Groups = append(host.Groups, g)
			if c.bulk {
				bulk.Groups = append(bulk.Groups, g)
				continue
			}
			requests.Groups, spent.Groups = append(requests.Groups, g), append(spent.Groups, g)
		}
		plots = append(plots, requests, host, spent, bulk)
	}
	return measured(r, plots)
}
