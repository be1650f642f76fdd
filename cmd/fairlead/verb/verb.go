// Package verb is what the verbs of fairlead share: the flags of the agent with its config file, and
// how a verb reaches an agent, takes two readings of it, and opens its recording. It has no verb
// itself; the packages beside it have those, and main lists them.
package verb

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	return dialed(e, cmd, func(cmd *cobra.Command, _ *AgentFlags, c *api.Client, args []string) error { return run(cmd, c, args) })
}

// dialed is Dialed with more flags of the agent, by name.
func dialed(e Env, cmd *cobra.Command, run func(cmd *cobra.Command, f *AgentFlags, c *api.Client, args []string) error, more ...string) *cobra.Command {
	f, flags := NewAgentFlags(e)
	f.Take(cmd, flags, append(more, "socket", "config")...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		c := api.Dial(f.Cfg.Socket)
		defer c.Close()
		return hint(run(cmd, f, c, args))
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
	Dir    string      // of the agent's; "": it records nothing
	Replay string      // path of the file; "": the agent's
	Client *api.Client // of the agent
}

// Recorded makes a verb a reader of a recording. It adds the flags --record-dir, --replay, --socket
// and --config.
func Recorded(e Env, cmd *cobra.Command, run func(cmd *cobra.Command, from Recording, args []string) error) *cobra.Command {
	replay := cmd.Flags().String("replay", "", "a file from record export, in place of the agent's recording")
	return dialed(e, cmd, func(cmd *cobra.Command, f *AgentFlags, c *api.Client, args []string) error {
		return run(cmd, Recording{f.Cfg.RecordDir, *replay, c}, args)
	}, "record-dir")
}

// Open opens the recording.
func (r Recording) Open() (*record.Reader, error) {
	path := r.Replay
	if path == "" {
		if path = r.Dir; path == "" {
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
func (r Recording) Source() (view.Source, string, error) {
	if r.Replay != "" {
		from, err := r.Open()
		return from, filepath.Base(r.Replay), err
	}
	host, err := os.Hostname()
	a := &view.Agent{Client: r.Client}
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

// The bounds of --interval. In a shorter one the cost of the reading itself would dominate.
const (
	MinInterval = 100 * time.Millisecond
	MaxInterval = time.Hour
)

// ReadingFlags are the flags of verbs that show the difference of two readings of an agent's
// counters.
type ReadingFlags struct {
	Total, Watch bool
	Interval     time.Duration
	Out          *cli.Format
}

// Reads makes a verb show readings of the containers, or of the one that its argument names. It adds
// ReadingFlags; total is the help of --total. read returns what to read, of all if ref is "".
func Reads[T any](e Env, cmd *cobra.Command, total string, read func(c *api.Client, ref string, f *ReadingFlags) Readings[T]) *cobra.Command {
	f := ReadingFlags{Out: cli.FormatFlag(cmd)}
	cmd.Flags().DurationVar(&f.Interval, "interval", 2*time.Second, "time between two readings")
	cmd.Flags().BoolVar(&f.Total, "total", false, total)
	cmd.Flags().BoolVar(&f.Watch, "watch", false, "print again after every interval, until interrupted")
	return Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		ref, err := f.check(args)
		if err != nil {
			return err
		}
		return read(c, ref, &f).show(cmd.Context(), e, f)
	})
}

// check returns the container that args name; "" means all.
func (f *ReadingFlags) check(args []string) (ref string, err error) {
	if f.Interval < MinInterval || f.Interval > MaxInterval {
		return "", cli.Usagef("--interval %v: must be %v to %v", f.Interval, MinInterval, MaxInterval)
	}
	if len(args) == 0 {
		return "", nil
	}
	if args[0] == "" {
		return "", cli.Usagef(`CONTAINER is ""`)
	}
	return args[0], nil
}

// Readings reads and prints one kind of counters.
type Readings[T any] struct {
	// Read returns a reading; it may measure over a time for that, 0 means at once.
	Read  func(ctx context.Context, over time.Duration) (T, error)
	Over  time.Duration         // the longest that Read measures
	After func(now, before T) T // the difference of two readings
	Print func(io.Writer, T)    // as a table
}

// next returns a reading after a delay, at the end of which it is measured.
func (r Readings[T]) next(ctx context.Context, after time.Duration) (v T, err error) {
	over := min(after, r.Over)
	if err := Wait(ctx, after-over); err != nil {
		return v, err
	}
	return r.Read(ctx, over)
}

// show reads and prints, once or until ctx ends.
func (r Readings[T]) show(ctx context.Context, e Env, f ReadingFlags) error {
	before, err := r.next(ctx, 0)
	if err != nil {
		return ReadingHint(err)
	}
	show := func(v T, again bool) error {
		if again {
			again := ""
			switch {
			case f.Out.Name == "yaml":
				again = "---\n"
			case f.Out.Name == "table" && cli.Terminal(e.Stdout):
				again = "\x1b[H\x1b[2J" // clear the screen and start at its top
			case f.Out.Name == "table":
				again = "\n"
			}
			if _, err := io.WriteString(e.Stdout, again); err != nil {
				return err
			}
		}
		return f.Out.Print(e.Stdout, v, func(w io.Writer) { r.Print(w, v) })
	}
	if f.Total {
		if err := show(before, false); err != nil || !f.Watch {
			return err
		}
	}
	for again := f.Total; ; again = true {
		now, err := r.next(ctx, f.Interval)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return ReadingHint(err)
		}
		v := now
		if !f.Total {
			v = r.After(now, before)
		}
		if err := show(v, again); err != nil || !f.Watch {
			return err
		}
		before = now
	}
}

// Wait returns after d, or with an error as soon as ctx ends.
func Wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// ReadingHint adds advice to an error.
func ReadingHint(err error) error {
	var e *api.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case "not_found":
		return fmt.Errorf("%w\n`fairlead ps` lists those that do", err)
	case "unavailable":
		return fmt.Errorf("%w\n`fairlead doctor` says what this host can do", err)
	}
	return err
}
