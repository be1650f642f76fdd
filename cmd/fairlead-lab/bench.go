package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/lab/bench"
	"github.com/fairlead-project/fairlead/lab/report"
)

func benchVerb(e cli.Env, experiments []bench.Experiment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure on this machine what fairlead does, off and on in turns",
		Long: `Measure on this machine what fairlead does, off and on in turns, in sandboxes
with a network of their own. --check compares the figures with the bars that they
have to reach. docs/bench.md says what each experiment measures.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.Unknown(cmd, "experiment", args[0])
			}
			var names []string
			for _, sub := range cmd.Commands() {
				names = append(names, sub.Name())
			}
			return cli.Usagef("the name of an experiment is missing: %s", strings.Join(names, " or "))
		},
		RunE: func(*cobra.Command, []string) error { return nil }, // never called: Args returns an error
	}
	for _, x := range experiments {
		cmd.AddCommand(experimentVerb(e, x))
	}
	return cmd
}

// experimentVerb returns the verb of an experiment.
func experimentVerb(e cli.Env, x bench.Experiment) *cobra.Command {
	cmd := &cobra.Command{Use: x.Name, Short: x.Short}
	var o bench.Options
	var list bool
	if len(x.Modes) > 0 {
		cmd.Flags().StringVar(&o.Mode, "mode", x.Modes[0], "the containers' policy while protection is on: isolate, charge or auto")
	}
	against := checkFlag(cmd)
	cmd.Args = cli.NArgs(0, 0, "")
	cmd.Flags().IntVar(&o.Rounds, "rounds", 0, "how often to measure each case (default "+x.Rounds+")")
	cmd.Flags().DurationVar(&o.Window, "window", 0, "how long to measure a case at a time (default "+x.Window+")")
	cmd.Flags().BoolVar(&o.Quick, "quick", false, "end within two minutes: fewer cases, less exact")
	cmd.Flags().StringVar(&o.Only, "only", "", "measure only cases that this regular expression matches, also those that --quick would leave out")
	cmd.Flags().BoolVar(&list, "list", false, "list the cases, and measure nothing")
	f := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.Rounds < 0 || o.Rounds > 1000 {
			return cli.Usagef("--rounds %d: must be 1 to 1000", o.Rounds)
		}
		if o.Window < 0 || o.Window > time.Hour {
			return cli.Usagef("--window %v: must be up to 1h", o.Window)
		}
		if !slices.Contains([]string{"", checkAll, checkFar}, *against) {
			return cli.Usagef("--check %q: must be all or far", *against)
		}
		if o.Mode != "" && !slices.Contains(x.Modes, o.Mode) {
			return cli.Usagef("--mode %q: must be isolate, charge or auto", o.Mode)
		}
		if o.Mode != "" && o.Mode != x.Modes[0] && *against != "" {
			return cli.Usagef("--mode %s: the bars of --check are for %s", o.Mode, x.Modes[0])
		}
		names, err := x.Cases(o)
		if err != nil {
			return cli.Usagef("--only %q: %v", o.Only, err)
		}
		run, write := x.Run, (*report.Report).WriteTable
		if *against != "" {
			var bars []report.Bar
			if bars, names = barsOf(x.Bars(), names); len(bars) == 0 {
				return cli.Usagef("--check: none of the chosen cases has a bar")
			}
			o.Far = *against == checkFar
			run = func(ctx context.Context, o bench.Options) (*report.Report, error) {
				return bench.Check(ctx, o, bars, x.Run)
			}
			write = writeBars
		}
		if list {
			for _, name := range names {
				fmt.Fprintln(e.Stdout, name)
			}
			return nil
		}
		o.Version = version
		o.Progress = progress(e.Stderr)
		if err := needRoot(); err != nil {
			return err
		}
		r, err := run(cmd.Context(), o)
		if cli.Terminal(e.Stderr) {
			fmt.Fprint(e.Stderr, "\r\x1b[K")
		}
		if err != nil {
			return err
		}
		if err := f.Print(e.Stdout, r, func(w io.Writer) { write(r, w) }); err != nil {
			return err
		}
		if missed(*against, r.Bars) {
			return cli.ErrTold
		}
		return nil
	}
	return cmd
}

// needRoot returns an error for a user who cannot run an experiment.
func needRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("this command needs root, to create network namespaces and control groups")
	}
	return nil
}

// progress shows the progress of an experiment: on a terminal in one line, otherwise in a
// line for each tenth.
func progress(w io.Writer) func(done, total int, what string) {
	tty := cli.Terminal(w)
	tenth := -1
	return func(done, total int, what string) {
		switch {
		case tty:
			fmt.Fprintf(w, "\r\x1b[K[%d/%d] %s", done+1, total, what)
		case done*10/total != tenth:
			tenth = done * 10 / total
			fmt.Fprintf(w, "[%d/%d] %s\n", done+1, total, what)
		}
	}
}
