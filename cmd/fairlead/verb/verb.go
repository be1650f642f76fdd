// Package verb is what the verbs of fairlead share: the flags of the agent with its config file, and
// how a verb reaches an agent, takes two readings of it, and opens its recording. It has no verb
// itself; the packages beside it have those, and main lists them.
package verb

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/record"
	"github.com/fairlead-project/fairlead/view"
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

// Recording is the recording that a verb reads: the agent's, or a file.
type Recording struct {
	Agent  *AgentFlags
	Replay string // path of the file; "": the agent's
}

// Recorded makes a verb a reader of a recording. It adds the flags --record-dir, --replay, --socket
// and --config.
func Recorded(e Env, cmd *cobra.Command, run func(cmd *cobra.Command, from Recording, args []string) error) *cobra.Command {
	f, flags := NewAgentFlags(e)
	from := Recording{Agent: f}
	f.Take(cmd, flags, "record-dir", "socket", "config")
	cmd.Flags().StringVar(&from.Replay, "replay", "", "a file from record export, in place of the agent's recording")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		return hint(run(cmd, from, args))
	}
	return cmd
}

// Open opens the recording.
func (r Recording) Open() (*record.Reader, error) {
	path := r.Replay
	if path == "" {
		if path = r.Agent.Cfg.RecordDir; path == "" {
			return nil, errors.New("the agent records nothing here: record-dir is empty in its config file")
		}
	}
	out, err := record.Open(path)
	switch {
	case errors.Is(err, fs.ErrPermission):
		err = fmt.Errorf("%w\na recording is for root and the group %s, or fairlead-view where there is one", err, api.Group)
	case errors.Is(err, fs.ErrNotExist) && r.Replay == "":
		err = fmt.Errorf("%w\nthe agent makes it when it runs: `systemctl status fairlead`", err)
	}
	return out, err
}

// Source returns what a view looks at, and its title: a recording, or the agent with its recording
// as its past.
func (r Recording) Source(c *api.Client) (view.Source, string, error) {
	if r.Replay != "" {
		from, err := r.Open()
		return from, filepath.Base(r.Replay), err
	}
	host, err := os.Hostname()
	a := &view.Agent{Client: c}
	if past, err := r.Open(); err == nil { // else there is no past to be shown
		a.Reader = past
	}
	return a, host, err
}

// Window returns the times of --since and --at: until at, or the end of the recording without one, and
// from since before that; without since from the start.
func Window(r *record.Reader, since time.Duration, at string) (from, to time.Time, err error) {
	if since < 0 {
		return from, to, cli.Usagef("--since %v: must not be negative", since)
	}
	_, last := r.Span()
	if at != "" {
		if to, err = view.When(at, time.Now()); err != nil {
			return from, to, cli.Usagef("--at: %w", err)
		}
		last = to
	}
	if since > 0 {
		from = last.Add(-since)
	}
	return from, to, nil
}
