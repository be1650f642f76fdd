// Command fairlead is the node agent, and contains the verbs that query an agent or work on the
// host. The verbs are in the packages below, which share package verb and print tables with package
// columns. Experiments and load generators are in fairlead-lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/containers"
	"github.com/fairlead-project/fairlead/cmd/fairlead/node"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/fairlead/views"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// version is the version of a plain go build; the Makefile makes the linker set it.
var version = api.Release + "-dev"

// verbs returns the verbs of the program. Those of features are in features.go.
func verbs() (list []func(cli.Env) *cobra.Command) {
	all := slices.Concat(node.Verbs(), containers.Verbs(), views.Verbs(), []verb.Verb{versionVerb})
	for _, f := range features() {
		all = append(all, f.verbs...)
	}
	for _, v := range all {
		list = append(list, func(e cli.Env) *cobra.Command { return v(env(e)) })
	}
	return list
}

// env adds to an environment what verbs need to know about this program.
func env(e cli.Env) verb.Env {
	out := verb.Env{Env: e, Version: version}
	for _, f := range features() {
		if f.flags != nil {
			out.Flags = append(out.Flags, f.flags)
		}
	}
	return out
}

// run runs the verb in e.Args and returns the exit status.
func run(ctx context.Context, e cli.Env) int { return program(verbs()).Run(ctx, e) }

func program(verbs []func(cli.Env) *cobra.Command) cli.Program {
	return cli.Program{
		Name:    "fairlead",
		Short:   "Make a shared host behave, for each container, as if the neighbours were not there",
		Version: agent.VersionOf(version),
		Next:    next,
		Verbs:   verbs,
	}
}

// next prints one step to take, depending on whether an agent runs.
func next(ctx context.Context, w io.Writer) {
	c := api.Dial(api.DefaultSocket)
	defer c.Close()
	if _, err := c.Version(ctx); errors.Is(err, api.ErrNoAgent) {
		fmt.Fprintf(w, "\nNo agent runs here. `fairlead doctor` says what one could do, `fairlead agent` starts one.\n")
	} else {
		fmt.Fprintf(w, "\nAn agent runs here. `fairlead top` shows who is slowed by whom.\n")
	}
}

func versionVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program; needs no agent",
		Args:  cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		return cli.Answer(e.Env, out, agent.VersionOf(e.Version), nil, func(w io.Writer, v api.Version) { cli.VersionText(w, "fairlead", v) })
	}
	return cmd
}
