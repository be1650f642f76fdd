package verb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

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
