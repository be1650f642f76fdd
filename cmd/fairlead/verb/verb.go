// Package verb is what the verbs of fairlead share: the flags of the agent with its config file, and
// how a verb reaches an agent, takes two readings of it, and opens its recording. It has no verb
// itself; the packages beside it have those, and main lists them.
package verb

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
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

// Dialed makes a verb a client of an agent. It adds the flags --socket and --config, and
// passes a Client of that agent to run.
func Dialed(e Env, cmd *cobra.Command, run func(cmd *cobra.Command, c *api.Client, args []string) error) *cobra.Command {
	f, flags := NewAgentFlags(e)
	f.Take(cmd, flags, "socket", "config")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		c := api.Dial(f.Cfg.Socket)
		defer c.Close()
		return hint(run(cmd, c, args))
	}
	return cmd
}

// hint adds advice to an error that means that no agent answers.
func hint(err error) error {
	if errors.Is(err, api.ErrNoAgent) {
		return fmt.Errorf("%w\nis it running? `systemctl status fairlead`, or start one as root: `fairlead agent`", err)
	}
	return err
}
