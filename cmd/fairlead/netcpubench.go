package main

import (
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/bench"
)

func benchNetCPUVerb(e env) *cobra.Command {
	var o bench.Options
	cmd := &cobra.Command{
		Use:   "netcpu",
		Short: "What neighbours' packets cost a victim on the same CPU, and what fairlead makes of it",
	}
	cmd.Flags().StringVar(&o.Mode, "mode", "isolate", "the netcpu of the containers while it is on: isolate, charge, auto")
	cmd.Flags().DurationVar(&o.Settle, "settle", 0, "how long the load runs before it is measured (default 300ms, with --mode charge 3s, auto 8s, with --quick 150ms)")
	cmd.Flags().BoolVar(&o.Docker, "docker", false, "use containers of a Docker Engine of the experiment's own, on its default bridge")
	return experiment{bench.NetCPUCases, bench.NetCPU, bench.NetCPUHeadline, bench.NetCPUPlots, bench.NetCPUBars}.verb(e, cmd, &o, "5, with --quick 2", "2s, with --quick 400ms", func() error {
		if !slices.Contains([]string{"isolate", "charge", "auto"}, o.Mode) {
			return usagef("--mode %q: must be isolate, charge or auto", o.Mode)
		}
		if o.Mode != "isolate" && cmd.Flags().Changed("check") {
			return usagef("--mode %s: the bars of --check are for isolate", o.Mode)
		}
		if o.Settle < 0 || o.Settle > time.Hour {
			return usagef("--settle %v: must be up to 1h", o.Settle)
		}
		return nil
	})
}
