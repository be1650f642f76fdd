package bench

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
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

// armTC is an arm of the traffic experiment: classes of tc, made by hand, divide the link.
const armTC arm = "tc"

// TrafficCases returns the names of the cases that Traffic would measure. Error: ErrNoCase.
func TrafficCases(o Options) ([]string, error) {
	_, names, err := o.trafficSetups()
	return names, err
}

func (o Options) trafficSetups() ([]trafficSetup, []string, error) {
	return choose(o, trafficCatalogue(), func(su *trafficSetup, chosen func(string, bool) bool) bool {
		su.cases = slices.DeleteFunc(su.cases, func(c trafficCase) bool { return !chosen(su.name+" "+c.name, c.quick) })
		return len(su.cases) > 0
	})
}

// Traffic runs the traffic experiment: how containers share an uplink without any
// mechanism, with fairlead, and with others. It needs root and two CPUs. When ctx ends,
// Traffic removes the rig before it returns.
func Traffic(ctx context.Context, o Options) (*report.Report, error) {
	e := o.experiment("traffic",
		usual{rounds: 3, settle: 500 * time.Millisecond, take: 2 * time.Second},
		usual{rounds: 1, settle: 300 * time.Millisecond, take: 500 * time.Millisecond})
	all, _, err := o.trafficSetups()
	if err != nil {
		return nil, err
	}
	if _, err := exec.LookPath("dockerd"); err != nil {
		n := len(all)
		all = slices.DeleteFunc(all, func(su trafficSetup) bool { return su.path == rig.Docker })
		if len(all) == 0 {
			return nil, fmt.Errorf("traffic experiment: %w", err)
		}
		if len(all) < n {
			e.notes = append(e.notes, "there is no Docker Engine (Debian package docker.io): what needs one was left out")
		}
	}
	var absent []string
	all, absent = trafficInstalled(all, onMachine)
	e.notes = append(e.notes, absent...)
	var plans []plan
	for _, su := range all {
		plans = append(plans, e.traffic(su))
	}
	return e.run(ctx, plans)
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
	s := &trafficSession{experiment: e, setup: su}
	p := plan{name: su.name, rigged: s}
	for _, c := range su.cases {
		p.series = append(p.series, series{
			begin: func(ctx context.Context) error { return s.begin(ctx, c) },
			cases: []armed{{su.name + " " + c.name, c.arms(), func(ctx context.Context, a arm) ([]figure, error) { return s.measure(ctx, c, a) }}},
			end:   s.end,
		})
	}
	return p
}
