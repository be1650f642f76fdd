package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
)

// The bounds of --interval: below, the reading itself is what one sees.
const (
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour
)

// netcpuFlags are what the flags of netcpu say.
type netcpuFlags struct {
	matrix, total, watch, wide bool
	interval                   time.Duration
	out                        *format
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
  HELD BACK BY  who had how much of its time; "own quota" is time for which its own
                CPU limit did not let it run, which is nobody else's doing

(system) are packets that belong to no container: for the host itself, ARP.

--matrix shows victims as rows and culprits as columns, without what ran in time of
their own. ksoftirqd and the host's NAPI threads work for all; what ran while a CPU
was idle is nobody's loss.`,
		Example: `  fairlead netcpu
  fairlead netcpu --matrix --interval 10s
  fairlead netcpu web-1 --total
  fairlead netcpu --watch`,
		Args: nargs(0, 1, "one CONTAINER"),
	}
	f := netcpuFlags{out: formatFlag(cmd)}
	cmd.Flags().BoolVar(&f.matrix, "matrix", false, "show victims and culprits")
	cmd.Flags().DurationVar(&f.interval, "interval", 2*time.Second, "time between two readings")
	cmd.Flags().BoolVar(&f.total, "total", false, "show what was counted since the agent began, not rates")
	cmd.Flags().BoolVar(&f.watch, "watch", false, "show it again after every interval, until interrupted")
	cmd.Flags().BoolVarP(&f.wide, "wide", "w", false, "do not shorten names, and leave out no column, to fit 100 columns")
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if f.interval < minInterval || f.interval > maxInterval {
			return usagef("--interval %v: it is %v to %v", f.interval, minInterval, maxInterval)
		}
		ref := ""
		if len(args) > 0 {
			if ref = args[0]; ref == "" {
				return usagef(`CONTAINER is ""`)
			}
		}
		return netcpu(cmd.Context(), e, c, ref, f)
	})
}

// netcpu reads and prints, once or until ctx ends.
func netcpu(ctx context.Context, e env, c *api.Client, ref string, f netcpuFlags) error {
	read := func() (api.NetCPU, error) {
		n, err := c.NetCPU(ctx, ref)
		return n, netcpuHint(err)
	}
	before, err := read()
	if err != nil {
		return err
	}
	show := func(n api.NetCPU, again bool) error {
		if again {
			again := ""
			switch {
			case f.out.name == "yaml":
				again = "---\n"
			case f.out.name == "table" && terminal(e.stdout):
				again = "\x1b[H\x1b[2J" // from the top of an empty screen
			case f.out.name == "table":
				again = "\n"
			}
			if _, err := io.WriteString(e.stdout, again); err != nil {
				return err
			}
		}
		return f.out.print(e.stdout, n, func(w io.Writer) { newNetcpuView(n, f).print(w, ref != "") })
	}
	if f.total {
		if err := show(before, false); err != nil || !f.watch {
			return err
		}
	}
	for again := f.total; ; again = true {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.interval):
		}
		now, err := read()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		n := now
		if !f.total {
			n = now.After(before)
		}
		if err := show(n, again); err != nil || !f.watch {
			return err
		}
		before = now
	}
}

// netcpuHint adds what to do.
func netcpuHint(err error) error {
	var e *api.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case "not_found":
		return fmt.Errorf("%w\n`fairlead ps` lists those that do", err)
	case "unavailable":
		return fmt.Errorf("%w\n`fairlead doctor` says what this host can do", err)
	}
	return err
}
