// Package netcpu has the verb netcpu, and the flags of its feature. It prints what the agent reports
// and measures nothing itself; main lists its verb.
package netcpu

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// Verbs are the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{netcpuVerb} }

// Flags adds the agent's flags for the feature.
func Flags(s *pflag.FlagSet, c *agent.FeatureConfig) {
	s.Var((*verb.Devices)(&c.XDP), "netcpu-xdp", "a device whose driver drops packets that a container may not have (native XDP), before tc would; most drivers reset their queues when that begins (with the first container that needs it) and ends (with the agent); separate several by commas, or repeat the flag; default: tc everywhere")
}

// netcpuFlags are the flags of the verb netcpu.
type netcpuFlags struct {
	verb.ReadingFlags
	matrix, wide bool
}

func netcpuVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "netcpu [CONTAINER]",
		SuggestFor: []string{"cpu"},
		Short:      "Show whose packets take whose CPU time",
		Long: `Show whose packets take whose CPU time, for all containers or in detail for one.
The command reads the accounts twice, --interval apart, and shows rates in percent
of one CPU. --total shows CPU seconds since the agent began to count.

  TASKS         CPU time that the container's control group is charged for
  RECV, SEND    CPU time of its packets in softirqs and NAPI threads, wherever that
                ran; what its tasks do in the system call is in TASKS
  STOLEN        the part of TASKS that went into the packets of others
  TOOK          time of other containers, and of tasks of the host, that went into
                its packets
  PPS, NS/PKT   packets per second that were handled for it, and the mean time of
                one; a super-packet (GRO, TSO) counts as one
  HELD BACK BY  who took how much of its time; "own quota" is time for which its own
                CPU limit did not let it run, which is nobody else's doing

(system) are packets that belong to no container: for the host itself, ARP.

ENFORCED lists containers that are charged, or whose packets are dropped:

  LIMIT %       the quota in force, or the weight without a quota, in percent of what
                the owner has set
  BALANCE MS    CPU time that the container is owed; negative: that it owes
  DROPPED PPS   packets for it per second that were dropped before they were queued,
                because its budget was used up or its queue was full

UPLINK lists the devices at which such packets are dropped when they come from
outside: by xdp in the driver (see --netcpu-xdp of the agent), or by tc.

--matrix shows victims as rows and culprits as columns. It leaves out time that a
container's packets took from itself. ksoftirqd and the host's NAPI threads work for
everybody; what ran while a CPU was idle is nobody's loss.`,
		Example: `  fairlead netcpu
  fairlead netcpu --matrix --interval 10s
  fairlead netcpu web-1 --total
  fairlead netcpu --watch`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	var f netcpuFlags
	f.Add(cmd, "show what was counted since the agent began, not rates")
	cmd.Flags().BoolVar(&f.matrix, "matrix", false, "show victims and culprits")
	cmd.Flags().BoolVarP(&f.wide, "wide", "w", false, "show all columns and whole names, even beyond the width of the terminal")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		ref, err := f.Check(args)
		if err != nil {
			return err
		}
		return verb.Readings[api.NetCPU]{
			Read:  func(ctx context.Context, _ time.Duration) (api.NetCPU, error) { return c.NetCPU(ctx, ref) },
			After: api.NetCPU.After,
			Print: func(w io.Writer, n api.NetCPU) { newNetcpuView(n, f).print(w, ref != "") },
		}.Show(cmd.Context(), e, f.ReadingFlags)
	})
}
