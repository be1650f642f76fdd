package bench

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
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

// arm is the mechanism that divides the link during a measurement.
type arm string

const (
	armOff arm = "off"
	armOn  arm = "on"
	armTC  arm = "tc"
	armCNI arm = "cni"
)

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
	plugin := rig.CNIPlugin() != ""
	if !plugin {
		e.notes = append(e.notes, "the CNI plugin bandwidth is not installed (Debian package containernetworking-plugins): it was left out")
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
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	for _, su := range all {
		for _, c := range su.cases {
			e.total += e.report.Rounds * len(c.arms(plugin))
		}
	}
	for _, su := range all {
		if err := e.traffic(ctx, su, plugin); err != nil {
			return nil, fmt.Errorf("traffic experiment, %s: %w", su.name, err)
		}
	}
	if e.missing != "" {
		e.notes = append(e.notes, "fairlead had no effect: traffic is "+strings.TrimSuffix(e.missing, "."))
	}
	e.report.Env.Notes = e.notes
	return e.report, nil
}

// arms returns the arms of a case.
func (c trafficCase) arms(plugin bool) []arm {
	if c.timed { // the other arms have nothing to time
		return []arm{armOn}
	}
	arms := []arm{armOff, armOn}
	if c.tc != nil {
		arms = append(arms, armTC)
	}
	if c.cni != nil && plugin {
		arms = append(arms, armCNI)
	}
	return arms
}

// traffic measures the cases of one rig, with each arm once in each round. The order of
// the arms alternates.
func (e *experiment) traffic(ctx context.Context, su trafficSetup, plugin bool) (err error) {
	s, err := newTrafficSession(ctx, su, e.settle, e.take)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, c := range su.cases {
		if err := s.begin(ctx, c); err != nil {
			return err
		}
		arms := c.arms(plugin)
		for round := range e.report.Rounds {
			for _, a := range arms {
				e.say(fmt.Sprintf("round %d: %s %s, %s", round+1, su.name, c.name, a))
				figures, err := s.measure(ctx, c, a)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, a, err)
				}
				for _, f := range figures {
					name := su.name + " " + c.name
					switch a {
					case armOff, armOn:
						e.report.Add(name, f.metric, f.unit, a == armOn, f.value)
					default:
						e.report.AddPeer(name, f.metric, f.unit, string(a), f.value)
					}
				}
			}
			slices.Reverse(arms)
		}
		if err := s.end(); err != nil {
			return err
		}
	}
	e.missing = s.guard.missing
	return nil
}

// figure is one value of one metric.
type figure struct {
	metric, unit string
	value        float64
}
