package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel/enter"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func restoreVerb(e verb.Env) *cobra.Command {
	f, flags := verb.NewAgentFlags(e)
	cmd := &cobra.Command{
		Use:        "restore [CONTAINER]",
		SuggestFor: []string{"undo", "unset", "reset", "clean", "rollback"},
		Short:      "Undo what was changed on the host",
		Long: `Undo what was changed on the host, for one container or for all. A value that
somebody else has changed since is left alone and reported.

If an agent runs, the agent does it, and leaves the container alone until its
policy is loaded again (fairlead policy reload). Without an agent this command
works through the journal itself, and CONTAINER must be an id. --expired undoes
only changes that have lapsed, which a running agent does by itself.`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	f.Take(cmd, flags, "socket", "state-dir", "proc", "config")
	expired := cmd.Flags().Bool("expired", false, "undo only changes that have lapsed, while no agent runs")
	out := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		// The last resort must work even if the config file is broken.
		if err := verb.Configure(cmd, f.Config, flags); err != nil {
			fmt.Fprintf(e.Stderr, "%s: %s\ngoing on without the config file\n", cmd.CommandPath(), cli.Lines(err.Error()))
		}
		done, err := restore(cmd.Context(), f, strings.Join(args, ""), *expired)
		if err := cli.Answer(e.Env, out, done, err, restored); err != nil {
			return err
		}
		for _, o := range done.Outcomes {
			if o.Result == string(journal.Failed) {
				return fmt.Errorf("some values could not be restored; they stay in the journal")
			}
		}
		return nil
	}
	return cmd
}

func restore(ctx context.Context, f *verb.AgentFlags, ref string, expired bool) (api.Restored, error) {
	// Other users may lack access, or with hidepid not see process 1.
	if err := enter.HostCgroups(f.Cfg.Roots.Proc); err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
		return api.Restored{}, err
	}
	c := api.Dial(f.Cfg.Socket)
	defer c.Close()
	if expired {
		if _, err := c.Version(ctx); !errors.Is(err, api.ErrNoAgent) {
			return api.Restored{Outcomes: []api.Outcome{}}, err
		}
		return restoreAlone(f, ref, func(e journal.Entry) bool { return e.Expired(time.Now()) })
	}
	done, err := c.Restore(ctx, ref)
	if !errors.Is(err, api.ErrNoAgent) {
		return done, err
	}
	return restoreAlone(f, ref, func(journal.Entry) bool { return true })
}

// restoreAlone undoes the matching entries of the journal while no agent runs.
func restoreAlone(f *verb.AgentFlags, ref string, match func(journal.Entry) bool) (api.Restored, error) {
	all := match
	if ref != "" {
		id, err := strconv.ParseUint(strings.TrimPrefix(ref, api.IDPrefix), 10, 64)
		if err != nil || id == 0 {
			return api.Restored{}, fmt.Errorf("no agent answers at %s, and without an agent CONTAINER must be an id, not %q", f.Cfg.Socket, ref)
		}
		match = func(e journal.Entry) bool { return e.Owner.Container == id && all(e) }
	}
	out, err := agent.RestoreAlone(f.Cfg, match)
	if errors.Is(err, journal.ErrBusy) {
		return api.Restored{}, fmt.Errorf("no agent answers at %s, but one holds %s: give its --socket", f.Cfg.Socket, f.Cfg.StateDir)
	}
	done, names := api.Restored{Outcomes: []api.Outcome{}}, agent.HostDevices(f.Cfg.Roots)
	for _, o := range out {
		done.Outcomes = append(done.Outcomes, agent.WireOutcome(o, names))
	}
	return done, err
}

func restored(w io.Writer, done api.Restored) {
	if done.Container != 0 {
		fmt.Fprintf(w, "%s:\n", columns.Whom(done.Name, done.Source, done.Container))
	}
	if len(done.Outcomes) == 0 {
		fmt.Fprintln(w, "nothing to undo")
	}
	for i, o := range done.Outcomes {
		if before := done.Outcomes[max(i-1, 0)]; i > 0 && before.Kind == o.Kind && before.Object == o.Object && before.Result == o.Result && o.Result != string(journal.Released) {
			continue // several features had turned this knob
		}
		object := objectText(api.Container{}, o.Kind, o.Object, o.Device)
		switch journal.Result(o.Result) {
		case journal.Restored:
			fmt.Fprintf(w, "%s: %s again, was %s\n", object, value(o.Before), value(o.Wrote))
		case journal.Released:
			fmt.Fprintf(w, "%s: no more for %s; another feature keeps it changed\n", object, cli.Show(o.Feature))
		case journal.Unchanged:
			fmt.Fprintf(w, "%s: is %s already\n", object, value(o.Before))
		case journal.Gone:
			fmt.Fprintf(w, "%s: no longer exists\n", object)
		case journal.Foreign:
			fmt.Fprintf(w, "%s: left at %s, which somebody else has set (we wrote %s; before it was %s)\n", object, value(o.Now), value(o.Wrote), value(o.Before))
		default:
			fmt.Fprintf(w, "%s: NOT put back to %s: %s\n", object, value(o.Before), cli.OneLine(o.Error))
		}
	}
}
