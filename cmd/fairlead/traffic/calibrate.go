package traffic

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
)

func trafficCalibrateVerb(e verb.Env) *cobra.Command {
	f, flags := verb.NewAgentFlags(e)
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Measure the rate of an uplink whose driver tells none",
		Long: `Measure the rate of the uplink that leads to another machine, and note it in the
file --link-rates, where the agent finds it the next time that policy or
containers change. It sends by TCP, for --for, as much as the link carries:
whoever shares the link notices. The other machine takes it in with --listen.`,
		Example: `  fairlead traffic calibrate --listen :9999         # on another machine
  fairlead traffic calibrate --to 192.0.2.7:9999    # here`,
		Args: cli.NArgs(0, 0, ""),
	}
	to := cmd.Flags().String("to", "", "HOST:PORT of who takes in what is sent")
	listen := cmd.Flags().String("listen", "", "take in what is sent to this address, for a minute")
	over := cmd.Flags().Duration("for", 3*time.Second, "how long to send, 10s at the most")
	f.Take(cmd, flags, "uplink", "link-rates", "config")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := verb.Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		switch {
		case (*to == "") == (*listen == ""):
			return cli.Usagef("one of --to and --listen is needed")
		case !hostPort(*to + *listen):
			return cli.Usagef("%q: want HOST:PORT", *to+*listen)
		case *listen != "":
			return takeIn(cmd.Context(), e, *listen)
		case f.Cfg.LinkRates == "":
			return cli.Usagef("--link-rates names no file")
		}
		device, rate, err := agent.CalibrateLink(cmd.Context(), f.Cfg, *to, *over)
		if err != nil {
			return err
		}
		fmt.Fprintf(e.Stdout, "%s sends %s to %s; noted in %s\n", cli.Show(device), policy.FormatRate(rate), cli.Show(*to), cli.Show(f.Cfg.LinkRates))
		return nil
	}
	return cmd
}

func hostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	n, perr := strconv.ParseUint(port, 10, 16)
	return err == nil && perr == nil && n > 0
}

// takeIn receives and discards the data that calibrate sends, for a minute.
func takeIn(ctx context.Context, e verb.Env, addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	fmt.Fprintf(e.Stdout, "taking in what is sent to %s, for a minute\n", l.Addr())
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			io.Copy(io.Discard, c)
		}()
	}
}
