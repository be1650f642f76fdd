package bench

import (
	"context"
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
	// StalledFlows is how many flows got no answer for a second.
	StalledFlows = "stalled flows"
)

// The arms of the overlay experiment, beside armOff and armOn.
const (
	armHost   arm = "host"   // the same load between the hosts' own addresses
	armRecipe arm = "recipe" // the cache as the paper describes it; see rig.Recipe
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
	var plans []plan
	for _, su := range all {
		plans = append(plans, e.overlay(su))
	}
	return e.run(ctx, plans)
}

// overlay plans the cases of one rig.
func (e *experiment) overlay(su overlaySetup) plan {
	s := &overlaySession{experiment: e, setup: su}
	p := plan{name: string(su.path), rigged: s}
	for _, c := range su.cases {
		name, rates := su.caseName(c), make(map[arm]float64)
		measure := func(ctx context.Context, a arm) ([]figure, error) {
			figures, err := s.measure(ctx, c, a)
			if len(figures) > 0 {
				rates[a] = figures[0].value
			}
			return figures, err
		}
		compare := func() {
			for _, a := range []arm{armOff, armOn, armRecipe} {
				if rate, ok := rates[a]; ok && rates[armHost] > 0 {
					e.add(name, a, figure{OfHost, "1", rate / rates[armHost]})
				}
			}
			clear(rates)
		}
		p.series = append(p.series, series{
			begin: func(ctx context.Context) error { return s.begin(ctx, c) },
			cases: []armed{{name, su.arms(), measure}}, compare: compare,
			end: s.end,
		})
	}
	return p
}
