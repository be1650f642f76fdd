package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// Experiment is an experiment of `fairlead-lab bench`.
type Experiment struct {
	Name, Short    string
	Rounds, Window string // the defaults, in words

	Cases func(Options) ([]string, error) // the names of the selected cases; error: ErrNoCase
	// Run measures the selected cases. It needs root and two CPUs. When its context ends, Run removes
	// the rigs before it returns.
	Run  func(context.Context, Options) (*report.Report, error)
	Bars func() []report.Bar

	Modes []string // the values of Options.Mode; its bars are for the first
}

// Experiments lists the experiments. A new feature adds its own.
func Experiments() []Experiment {
	const ms = time.Millisecond
	netcpu := experimentOf("netcpu", "Measure what neighbours' packets cost a victim on the same CPU",
		usual{rounds: 5, settle: 300 * ms, take: 2 * time.Second, takes: 3}, usual{rounds: 2, settle: 150 * ms, take: 400 * ms, takes: 1}, netcpuPlans, NetCPUBars)
	netcpu.Modes = []string{"isolate", "charge", "auto"}
	return []Experiment{
		netcpu,
		experimentOf("traffic", "Measure how containers share an uplink: with fairlead, tc by hand, and nothing",
			usual{rounds: 3, settle: 500 * ms, take: 2 * time.Second}, usual{rounds: 1, settle: 300 * ms, take: 500 * ms}, trafficPlans, trafficBars),
		experimentOf("latency", "How far round trips from a container are off, raw and corrected, and what measuring costs",
			usual{rounds: 5, settle: 300 * ms, take: 2 * time.Second}, usual{rounds: 2, settle: 150 * ms, take: 500 * ms}, latencyPlans, LatencyBars),
		experimentOf("blockio", "How a load at a disk fares beside neighbours that compute, with nothing done and with a reservation",
			usual{rounds: 5, take: 2 * time.Second}, usual{rounds: 2, take: time.Second}, blockioPlans, BlockIOBars),
		experimentOf("overlay", "Measure containers of two hosts that talk over an overlay network",
			usual{rounds: 3, settle: 300 * ms, take: 1500 * ms}, usual{rounds: 2, settle: 200 * ms, take: time.Second}, overlayPlans, OverlayBars),
	}
}

// experimentOf makes an experiment of the plans for all its cases.
func experimentOf(name, short string, u, quick usual, plans func(*experiment, Options) []plan, bars func() []report.Bar) Experiment {
	return Experiment{
		Name: name, Short: short, Bars: bars,
		Rounds: fmt.Sprintf("%d, with --quick %d", u.rounds, quick.rounds),
		Window: fmt.Sprintf("%v, with --quick %v", u.take, quick.take),
		Cases: func(o Options) ([]string, error) {
			_, names, err := choose(plans(o.experiment(name, u, quick), o), o)
			return names, err
		},
		Run: func(ctx context.Context, o Options) (*report.Report, error) {
			e := o.experiment(name, u, quick)
			list, _, err := choose(plans(e, o), o)
			if err != nil {
				return nil, err
			}
			noEngine := rig.EngineRuns()
			list, notes := installed(list, onMachine, noEngine)
			e.notes = append(e.notes, notes...)
			if len(list) == 0 && noEngine != nil {
				return nil, fmt.Errorf("%s experiment: %w", name, noEngine)
			}
			return e.run(ctx, list)
		},
	}
}
