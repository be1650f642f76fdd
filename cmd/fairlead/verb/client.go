package verb

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
)

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
