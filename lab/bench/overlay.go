package bench

import (
	"context"

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

// armHost is the same load between the hosts' own addresses, beside armOff and armOn.
const armHost arm = "host"

// overlayPlans measure containers of two hosts that talk over an overlay network, without and with
// the short path, against host networking over the same wire.
func overlayPlans(e *experiment, _ Options) (plans []plan) {
	for _, su := range overlayCatalogue() {
		plans = append(plans, e.overlay(su))
	}
	return plans
}

// overlay plans the cases of one rig.
func (e *experiment) overlay(su overlaySetup) plan {
	s := &overlaySession{experiment: e, setup: su}
	p := plan{name: string(su.path), engine: su.path == rig.Swarm, rigged: s}
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
			for _, a := range offOn() {
				if rate, ok := rates[a]; ok && rates[armHost] > 0 {
					e.add(name, a, figure{OfHost, "1", rate / rates[armHost]})
				}
			}
			clear(rates)
		}
		p.series = append(p.series, series{
			begin:   func(ctx context.Context) error { return s.begin(ctx, c) },
			cases:   []armed{{name: name, quick: c.quick, needs: c.service, arms: append(offOn(), armHost), measure: measure}},
			compare: compare,
			end:     s.end,
		})
	}
	return p
}
