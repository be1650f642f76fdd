// Package cli is what the commands fairlead and fairlead-lab share as command-line programs: their
// environment, how verbs are run, errors in the command line and exit statuses, and the output as
// text, JSON and YAML. It has no verb; package main of each command has those.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/api"
)

// Env is the environment of a program, so that tests can run it in their own process.
type Env struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Getenv         func(string) string
	Args           []string
}

// Program is a program of several verbs.
type Program struct {
	Name, Short string
	Version     api.Version
	Next        func(context.Context, io.Writer) // prints what to do next, for a call without a verb; nil: nothing
	Verbs       []func(Env) *cobra.Command       // in the order of the help
}

// ErrTold is the error of a verb that has printed the failure itself.
var ErrTold = errors.New("")

// Run runs the verb in e.Args and returns the exit status. SIGINT and SIGTERM end the context
// of the verb; a second signal ends the program at once.
func (p Program) Run(ctx context.Context, e Env) int {
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel)

	cmd, err := p.Root(e).ExecuteContextC(ctx)
	var usage UsageError
	switch {
	case err == nil:
		return Done
	case errors.Is(err, ErrTold):
		return Failed
	case errors.As(err, &usage):
		fmt.Fprintf(e.Stderr, "%s: %s\nsee %s --help\n", cmd.CommandPath(), Lines(api.Text(err)), cmd.CommandPath())
		return Usage
	}
	fmt.Fprintf(e.Stderr, "%s: %s\n", cmd.CommandPath(), Lines(api.Text(err)))
	return Failed
}

// Root returns the command that has the verbs below it. The man pages are made from it.
func (p Program) Root(e Env) *cobra.Command {
	var shown bool
	root := &cobra.Command{
		Use:           p.Name[strings.LastIndex(p.Name, " ")+1:], // cobra replaces this one word
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: p.Name},
		Short:         p.Short,
		Long:          p.Short + ".\n\n" + statusHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return Unknown(cmd, "command", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if shown {
				VersionText(e.Stdout, p.Name, p.Version)
				return nil
			}
			err := cmd.Help()
			if err == nil && p.Next != nil {
				p.Next(cmd.Context(), e.Stdout)
			}
			return err
		},
	}
	root.Flags().BoolVar(&shown, "version", false, "show the version of this program")
	root.SetArgs(e.Args)
	root.SetOut(e.Stdout)
	root.SetErr(e.Stderr)
	root.SetHelpCommand(helpVerb(root))
	root.SetFlagErrorFunc(flagError)
	for _, verb := range p.Verbs {
		root.AddCommand(verb(e))
	}
	return root
}

// helpVerb shows the help of a verb, as --help does.
func helpVerb(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:    "help [VERB...]",
		Short:  "Show the help of a verb",
		Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err == nil && len(rest) > 0 {
				err = Unknown(cmd, "command", rest[0])
			}
			if err != nil {
				return err
			}
			return cmd.Help()
		},
	}
}

// VersionText prints the version of a program in a line.
func VersionText(w io.Writer, name string, v api.Version) {
	fmt.Fprintf(w, "%s %s", name, v.Version)
	if v.Commit != "" {
		fmt.Fprintf(w, " (%.12s)", v.Commit)
	}
	fmt.Fprintf(w, ", %s, API v%s, on Linux %s\n", v.Go, v.API, Show(v.Kernel))
}

// The exit statuses. Root's help documents them.
const (
	Done   = 0
	Failed = 1
	Usage  = 2
)

const statusHelp = `Exit status: 0 if it was done; 1 if it failed, was interrupted, or holds only in
part; 2 if the command line is wrong.`

// UsageError is an error in the command line.
type UsageError struct{ error }

func (e UsageError) Unwrap() error { return e.error }

// Usagef makes a UsageError.
func Usagef(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// flagError says in words what is wrong with a flag.
func flagError(_ *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		return Usagef("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), Refusal(invalid.GetFlag(), invalid.Unwrap()))
	}
	return UsageError{err}
}

// Refusal says why a flag does not take a value.
func Refusal(f *pflag.Flag, err error) string {
	switch f.Value.Type() {
	case "duration":
		return "want a time, as 500ms, 2s or 1m"
	case "bool":
		return "want true or false"
	case "float64":
		return "want a number"
	case "int", "int64":
		return "want a whole number"
	case "uint", "uint32":
		return "want a whole number, not below 0"
	case "uint16":
		return "want a whole number, 0 to 65535"
	}
	return api.Text(err)
}

// Unknown is the error for a word that is no verb of cmd, with those that may be meant.
func Unknown(cmd *cobra.Command, what, word string) error {
	cmd.SuggestionsMinimumDistance = 2
	near := cmd.SuggestionsFor(word) // also by SuggestFor: what other tools call it
	if len(near) == 0 {
		return Usagef("unknown %s %q", what, word)
	}
	return Usagef("unknown %s %q; did you mean %s?", what, word, strings.Join(near, " or "))
}

// NArgs checks the number of arguments, and returns a UsageError.
func NArgs(low, high int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		got := strings.Trim(fmt.Sprintf("%q", args), "[]")
		switch {
		case len(args) < low:
			return Usagef("%s is missing", what)
		case len(args) > high && high == 0:
			return Usagef("takes no argument, got %s", got)
		case len(args) > high:
			return Usagef("takes %s only, got %s", what, got)
		}
		return nil
	}
}
