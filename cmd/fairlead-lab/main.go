// Command fairlead-lab measures on this machine what fairlead does: the demo, the experiments, and
// the load generators that they start. It runs fairlead's agent in separate network namespaces. It
// is for developers and evaluators, and no host needs it.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/lab/bench"
)

// version is the version of a plain go build; the Makefile makes the linker set it.
var version = api.Release + "-dev"

func main() {
	if status, ok := bench.Reexec(os.Args); ok {
		os.Exit(status)
	}
	os.Exit(run(context.Background(), cli.Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Args: os.Args[1:]}, bench.Experiments()))
}

// run runs the verb in e.Args and returns the exit status.
func run(ctx context.Context, e cli.Env, experiments []bench.Experiment) int {
	return cli.Program{
		Name:    "fairlead-lab",
		Short:   "Measure on this machine what fairlead does",
		Version: agent.VersionOf(version),
		Verbs: []func(cli.Env) *cobra.Command{
			demoVerb,
			func(e cli.Env) *cobra.Command { return benchVerb(e, experiments) },
		},
	}.Run(ctx, e)
}

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
