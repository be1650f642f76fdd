// Command fairlead is the node agent, and the verbs that query an agent or work on the host. Each
// verb has a file of its own. They share the tables of table.go, and with fairlead-lab the package
// cli. Experiments and load generators are in fairlead-lab.
package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// version is the version of a plain go build; the Makefile has the linker set it.
var version = api.Release + "-dev"

// verbs lists the verbs in the order of the help. A new verb adds a line here and a file. The verbs
// of features are in features.go.
func verbs() []func(cli.Env) *cobra.Command {
	list := []func(cli.Env) *cobra.Command{
		agentVerb,
		topVerb,
		psVerb,
		explainVerb,
		setVerb,
		reserveVerb,
		doctorVerb,
		healthVerb,
		recordVerb,
		reportVerb,
		restoreVerb,
		webVerb,
		policyVerb,
		keysVerb,
		versionVerb,
	}
	for _, f := range features() {
		if f.verb != nil {
			list = append(list, f.verb)
		}
	}
	return list
}

// run runs the verb in e.Args and returns the exit status.
func run(ctx context.Context, e cli.Env) int { return runVerbs(ctx, e, verbs()) }

func runVerbs(ctx context.Context, e cli.Env, verbs []func(cli.Env) *cobra.Command) int {
	return program(verbs).Run(ctx, e)
}

func program(verbs []func(cli.Env) *cobra.Command) cli.Program {
	return cli.Program{
		Name:    "fairlead",
		Short:   "Make a shared host behave, for each container, as if the neighbours were not there",
		Version: agent.VersionOf(version),
		Verbs:   verbs,
	}
}
