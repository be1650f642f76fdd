package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/lab/report"
)

// Experiment is an experiment of `fairlead-lab bench`.
type Experiment struct {
	Name, Short    string
	Rounds, Window string // the defaults, in words

	Cases func(Options) ([]string, error) // the names of the selected cases; error: ErrNoCase
	Run   func(context.Context, Options) (*report.Report, error)
	Bars  func() []report.Bar

	Flags func(*pflag.FlagSet, *Options)   // adds flags that only it has; nil: none
	Check func(o Options, bars bool) error // refuses values of these flags, for a run against bars or without; nil: any
}

// Experiments lists the experiments. A new feature adds its own.
func Experiments() []Experiment {
	return []Experiment{
		{
			Name: "netcpu", Short: "Measure what neighbours' packets cost a victim on the same CPU",
			Rounds: "5, with --quick 2", Window: "2s, with --quick 400ms",
			Cases: NetCPUCases, Run: NetCPU, Bars: NetCPUBars,
			Flags: netcpuFlags, Check: checkNetCPU,
		},
		{
			Name: "traffic", Short: "Measure how containers share an uplink: with fairlead, tc by hand, and nothing",
			Rounds: "3, with --quick 1", Window: "2s, with --quick 500ms",
			Cases: TrafficCases, Run: Traffic, Bars: TrafficBars,
		},
		{
			Name: "latency", Short: "How far round trips from a container are off, raw and corrected, and what measuring costs",
			Rounds: "5, with --quick 2", Window: "2s, with --quick 500ms",
			Cases: LatencyCases, Run: Latency, Bars: LatencyBars,
		},
		{
			Name: "blockio", Short: "How a load at a disk fares beside neighbours that compute, with nothing done and with a reservation",
			Rounds: "5, with --quick 2", Window: "2s, with --quick 1s",
			Cases: BlockIOCases, Run: BlockIO, Bars: BlockIOBars,
		},
		{
			Name: "overlay", Short: "Measure containers of two hosts that talk over an overlay network",
			Rounds: "3, with --quick 2", Window: "1.5s, with --quick 1s",
			Cases: OverlayCases, Run: Overlay, Bars: OverlayBars,
		},
	}
}

func netcpuFlags(s *pflag.FlagSet, o *Options) {
	s.StringVar(&o.Mode, "mode", "isolate", "the containers' policy while protection is on: isolate, charge or auto")
	s.DurationVar(&o.Settle, "settle", 0, "how long the load runs before it is measured (default 300ms, with --mode charge 3s, auto 8s, with --quick 150ms)")
}

func checkNetCPU(o Options, bars bool) error {
	switch {
	case !slices.Contains([]string{"isolate", "charge", "auto"}, o.Mode):
		return fmt.Errorf("--mode %q: must be isolate, charge or auto", o.Mode)
	case o.Mode != "isolate" && bars:
		return fmt.Errorf("--mode %s: the bars of --check are for isolate", o.Mode)
	case o.Settle < 0 || o.Settle > time.Hour:
		return fmt.Errorf("--settle %v: must be up to 1h", o.Settle)
	}
	return nil
}
