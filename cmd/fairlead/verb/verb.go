// Package verb is what the verbs of fairlead share: the flags of the agent with its config file, and
// how a verb reaches an agent, takes two readings of it, and opens its recording. It has no verb
// itself; the packages beside it have those, and main lists them.
package verb

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// Env is the environment of a verb, and what the program knows of itself.
type Env struct {
	cli.Env
	Version string
	Flags   []func(*pflag.FlagSet, *agent.FeatureConfig) // add the flags of each feature to the agent's
}

// Verb makes a verb of the program.
type Verb func(Env) *cobra.Command
