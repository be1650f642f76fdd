package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

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
