// Command fairlead is the whole program: the node agent, and the verbs that
// look at one and work on the host. Each verb has a file of its own; what they
// share is the environment in this file and the printing in output.go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/bench"
)

// version is set by the linker.
var version = "unknown"

func main() {
	if status, ok := bench.Reexec(os.Args); ok {
		os.Exit(status)
	}
	os.Exit(run(context.Background(), env{stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, args: os.Args[1:]}))
}

// env is what the program has from outside, so that tests can run it inside
// their own process.
type env struct {
	stdout, stderr io.Writer
	getenv         func(string) string
	args           []string
}

// verbs are what the program can do, in the order of its help. A new verb is
// one line here and a file with its function; those of features are in features.go.
func verbs() []func(env) *cobra.Command {
	list := []func(env) *cobra.Command{
		agentVerb,
		psVerb,
		explainVerb,
		setVerb,
		reserveVerb,
		doctorVerb,
		restoreVerb,
		policyVerb,
		demoVerb,
		benchVerb,
		versionVerb,
	}
	for _, f := range features() {
		list = append(list, f.verb)
	}
	return list
}

// The exit statuses.
const (
	statusDone   = 0
	statusFailed = 1
	statusUsage  = 2
)

// usageError is an error of whoever typed the command.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usagef makes a usageError.
func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errTold is returned by a verb that has failed and has said so itself.
var errTold = errors.New("")

// run does what e.args say and returns the exit status. SIGINT and SIGTERM end
// the context of the verb; a second one ends the program at once.
func run(ctx context.Context, e env) int { return runVerbs(ctx, e, verbs()) }

func runVerbs(ctx context.Context, e env, verbs []func(env) *cobra.Command) int {
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel)

	root := &cobra.Command{
		Use:           "fairlead",
		Short:         "Make a shared host behave, for each container, as if the neighbours were not there",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	root.SetHelpCommand(&cobra.Command{Hidden: true, Use: "no-help"})
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	for _, verb := range verbs {
		root.AddCommand(verb(e))
	}

	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	switch {
	case err == nil:
		return statusDone
	case errors.Is(err, errTold):
		return statusFailed
	case errors.As(err, &usage):
		fmt.Fprintf(e.stderr, "%s: %s\nsee %s --help\n", cmd.CommandPath(), lines(err.Error()), cmd.CommandPath())
		return statusUsage
	}
	fmt.Fprintf(e.stderr, "%s: %s\n", cmd.CommandPath(), lines(err.Error()))
	return statusFailed
}

// nargs is cobra's check of the number of arguments, as a usageError.
func nargs(low, high int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < low:
			return usagef("%s is missing", what)
		case len(args) > high && high == 0:
			return usagef("takes no argument, got %s", strings.Join(quoted(args), " "))
		case len(args) > high:
			return usagef("takes %s only, got %s", what, strings.Join(quoted(args), " "))
		}
		return nil
	}
}

func quoted(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = fmt.Sprintf("%q", a)
	}
	return out
}
