package bench

import (
	"cmp"
	"context"

	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the traffic experiment, in addition to those of netcpu.
const (
	Total      = "received in all"
	ReceivedBy = "received by "   // followed by a container that has a rate
	ShareOf    = "share of "      // followed by a container: its fraction of the total
	Settling   = "settled after " // followed by a phase: the time until the shares are right
	P999       = "latency p99.9"
)

// armTC divides the link as an operator would by hand, beside armOff and armOn.
const armTC arm = "tc"

// trafficPlans measure how containers share an uplink without any mechanism, with fairlead, and with tc
// by hand.
func trafficPlans(e *experiment, _ Options) (plans []plan) {
	for _, su := range trafficCatalogue() {
		plans = append(plans, e.traffic(su))
	}
	return plans
}

// arms returns the arms of a case.
func (c trafficCase) arms() []arm {
	if c.timed { // the other arms have nothing to time
		return []arm{armOn}
	}
	arms := offOn()
	if c.tc != nil {
		arms = append(arms, armTC)
	}
	return arms
}

// traffic plans the cases of one rig.
func (e *experiment) traffic(su trafficSetup) plan {
	s := &trafficSession{bed: bed{experiment: e}, setup: su}
	p := plan{name: su.name, engine: su.path == rig.Docker, rigged: s}
	for _, c := range su.cases {
		p.series = append(p.series, series{
			begin: func(ctx context.Context) error { return s.begin(ctx, c) },
			cases: []armed{{
				name: su.name + " " + c.name, quick: c.quick, needs: c.service(), arms: c.arms(),
				measure: func(ctx context.Context, a arm) ([]figure, error) { return s.measure(ctx, c, a) },
			}},
			end: s.end,
		})
	}
	return p
}

// service returns the real server of a case; "" is none.
func (c trafficCase) service() (s rig.Service) {
	for _, snd := range c.send {
		s = cmp.Or(s, snd.service)
	}
	return s
}
