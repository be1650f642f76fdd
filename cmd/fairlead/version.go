package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
)

func versionVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program; needs no agent",
		Args:  nargs(0, 0, ""),
	}
	out := formatFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		return answer(e, out, agent.VersionOf(version), nil, versionText)
	}
	return cmd
}

func versionText(w io.Writer, v api.Version) {
	fmt.Fprintf(w, "fairlead %s", v.Version)
	if v.Commit != "" {
		fmt.Fprintf(w, " (%.12s)", v.Commit)
	}
	fmt.Fprintf(w, ", %s, API v%s, on Linux %s\n", v.Go, v.API, show(v.Kernel))
}
