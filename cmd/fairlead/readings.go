package main

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
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour
)

// readingFlags are the flags of verbs that show the difference of two readings of an agent's
// counters.
type readingFlags struct {
	total, watch bool
	interval     time.Duration
	out          *cli.Format
}

func (f *readingFlags) add(cmd *cobra.Command, total string) {
	f.out = cli.FormatFlag(cmd)
	cmd.Flags().DurationVar(&f.interval, "interval", 2*time.Second, "time between two readings")
	cmd.Flags().BoolVar(&f.total, "total", false, total)
	cmd.Flags().BoolVar(&f.watch, "watch", false, "print again after every interval, until interrupted")
}

// check returns the container that args name; "" means all.
func (f *readingFlags) check(args []string) (ref string, err error) {
	if f.interval < minInterval || f.interval > maxInterval {
		return "", cli.Usagef("--interval %v: must be %v to %v", f.interval, minInterval, maxInterval)
	}
	if len(args) == 0 {
		return "", nil
	}
	if args[0] == "" {
		return "", cli.Usagef(`CONTAINER is ""`)
	}
	return args[0], nil
}

// readings reads and prints one kind of counters.
type readings[T any] struct {
	// read returns a reading after a delay, in which it may measure; 0 means at once.
	read  func(ctx context.Context, after time.Duration) (T, error)
	after func(now, before T) T // the difference of two readings
	print func(io.Writer, T)    // as a table
}

// show reads and prints, once or until ctx ends.
func (r readings[T]) show(ctx context.Context, e cli.Env, f readingFlags) error {
	before, err := r.read(ctx, 0)
	if err != nil {
		return readingHint(err)
	}
	show := func(v T, again bool) error {
		if again {
			again := ""
			switch {
			case f.out.Name == "yaml":
				again = "---\n"
			case f.out.Name == "table" && cli.Terminal(e.Stdout):
				again = "\x1b[H\x1b[2J" // clear the screen and start at its top
			case f.out.Name == "table":
				again = "\n"
			}
			if _, err := io.WriteString(e.Stdout, again); err != nil {
				return err
			}
		}
		return f.out.Print(e.Stdout, v, func(w io.Writer) { r.print(w, v) })
	}
	if f.total {
		if err := show(before, false); err != nil || !f.watch {
			return err
		}
	}
	for again := f.total; ; again = true {
		now, err := r.read(ctx, f.interval)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return readingHint(err)
		}
		v := now
		if !f.total {
			v = r.after(now, before)
		}
		if err := show(v, again); err != nil || !f.watch {
			return err
		}
		before = now
	}
}

// wait returns after d, or with an error as soon as ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// readingHint adds advice to an error.
func readingHint(err error) error {
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
