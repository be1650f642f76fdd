package main

import (
	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/lab/bench"
)

func demoVerb(e cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:   "demo",
		Short: "Show in half a minute what a neighbour's packets cost, without and with fairlead",
		Long: `Show in half a minute what a neighbour's packets cost, without and with fairlead.
The demo builds two sandboxes with a network of their own, floods one of them,
and removes everything at the end, also on Ctrl-C. It needs root and two CPUs.`,
		Args: cli.NArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needRoot(); err != nil {
				return err
			}
			screen := bench.Screen{Writer: e.Stdout, Colour: cli.Terminal(e.Stdout) && e.Getenv("NO_COLOR") == ""}
			return bench.Demo(cmd.Context(), screen, version)
		},
	}
}
