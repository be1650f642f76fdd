package main

import (
	"context"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench"
)

// netcpuAgentFlags are the agent's flags for the feature.
func netcpuAgentFlags(s *pflag.FlagSet, c *agent.FeatureConfig) {
	s.Var((*devices)(&c.XDP), "netcpu-xdp", "a device of the host at which packets that a container may not have are dropped in the driver (native XDP), where tc would be too late; most drivers reset their queues when that begins, with the first container that needs it, and ends, with the agent; several: with commas, or the flag again; none: by tc everywhere")
}

// netcpuFlags are what the flags of netcpu say.
type netcpuFlags struct {
	readingFlags
	matrix, wide bool
}

func netcpuVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "netcpu [CONTAINER]",
		Short: "Show whose packets take whose CPU time",
		Long: `Show whose packets take whose CPU time: of all containers, or of one in detail.
Two readings, --interval apart, give rates in percent of one CPU; --total shows
CPU seconds since the agent began to count.

  TASKS         CPU time that the container's control group is charged for
  RECV, SEND    CPU time of its packets in softirqs and NAPI threads, wherever it
                ran; what its tasks do in the system call is in TASKS
  STOLEN        the part of TASKS that went into the packets of others
  TOOK          time of other containers, and of tasks of the host, that went into
                its packets
  PPS           packets that were handled for it in a second, NS/PKT what one took in
                the mean; a super-packet (GRO, TSO) counts as one
  HELD BACK BY  who had how much of its time; "own quota" is time for which its own
                CPU limit did not let it run, which is nobody else's doing

(system) are packets that belong to no container: for the host itself, ARP.

ENFORCED are containers that are charged, or whose packets are dropped:

  LIMIT %       the quota in force, or the weight without one, against its owner's
  BALANCE MS    CPU time that the container is owed at present; negative: that it owes
  DROPPED PPS   packets for it that were dropped before they were queued, in a second,
                as its budget was used up or its queue full

UPLINK are the devices at which such packets are dropped when they come from outside:
by xdp in the driver (see --netcpu-xdp of the agent), or by tc.

--matrix shows victims as rows and culprits as columns, without what ran in time of
their own. ksoftirqd and the host's NAPI threads work for all; what ran while a CPU
was idle is nobody's loss.`,
		Example: `  fairlead netcpu
  fairlead netcpu --matrix --interval 10s
  fairlead netcpu web-1 --total
  fairlead netcpu --watch`,
		Args: nargs(0, 1, "one CONTAINER"),
	}
	var f netcpuFlags
	f.add(cmd, "show what was counted since the agent began, not rates")
	cmd.Flags().BoolVar(&f.matrix, "matrix", false, "show victims and culprits")
	cmd.Flags().BoolVarP(&f.wide, "wide", "w", false, "do not shorten names, and leave out no column, to fit 100 columns")
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		ref, err := f.check(args)
		if err != nil {
			return err
		}
		return readings[api.NetCPU]{
			read: func(ctx context.Context, after time.Duration) (api.NetCPU, error) {
				if err := wait(ctx, after); err != nil {
					return api.NetCPU{}, err
				}
				return c.NetCPU(ctx, ref)
			},
			after: api.NetCPU.After,
			print: func(w io.Writer, n api.NetCPU) { newNetcpuView(n, f).print(w, ref != "") },
		}.show(cmd.Context(), e, f.readingFlags)
	})
}

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
