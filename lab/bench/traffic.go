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

// The arms of the traffic experiment, beside armOff and armOn: another mechanism divides the link.
const (
	armTC  arm = "tc"
	armCNI arm = "cni"
)

// trafficPlans measure how containers share an uplink without any mechanism, with fairlead, and with
// another.
func trafficPlans(e *experiment, _ Options) (plans []plan) {
	plugin := rig.CNIPlugin() != ""
	if !plugin {
		e.notes = append(e.notes, "the CNI plugin bandwidth is not installed (Debian package containernetworking-plugins): it was left out")
	}
	for _, su := range trafficCatalogue() {
		plans = append(plans, e.traffic(su, plugin))
	}
	return plans
}

// arms returns the arms of a case.
func (c trafficCase) arms(plugin bool) []arm {
	if c.timed { // the other arms have nothing to time
		return []arm{armOn}
	}
	arms := offOn()
	if c.tc != nil {
		arms = append(arms, armTC)
	}
	if c.cni != nil && plugin {
		arms = append(arms, armCNI)
	}
	return arms
}

// traffic plans the cases of one rig.
func (e *experiment) traffic(su trafficSetup, plugin bool) plan {
	s := &trafficSession{experiment: e, setup: su}
	p := plan{name: su.name, engine: su.path == rig.Docker, rigged: s}
	for _, c := range su.cases {
		p.series = append(p.series, series{
			begin: func(ctx context.Context) error { return s.begin(ctx, c) },
			cases: []armed{{
				name: su.name + " " + c.name, quick: c.quick, needs: c.service(), arms: c.arms(plugin),
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
