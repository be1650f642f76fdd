// Command fairlead is the whole program: the node agent, and the verbs that query an agent
// or work on the host. Each verb has a file of its own. They share the environment in this
// file and the printing in output.go.
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

// The linker sets version.
var version = "unknown"

func main() {
	if status, ok := bench.Reexec(os.Args); ok {
		os.Exit(status)
	}
	os.Exit(run(context.Background(), env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, args: os.Args[1:]}))
}

// env is the environment of the program, so that tests can run it in their own process.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	args           []string
}

// verbs lists the verbs in the order of the help. A new verb adds a line here and a file.
// The verbs of features are in features.go.
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
		keysVerb,
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

// usageError is an error in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usagef makes a usageError.
func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errTold is the error of a verb that has printed the failure itself.
var errTold = errors.New("")

// run runs the verb in e.args and returns the exit status. SIGINT and SIGTERM end the context
// of the verb; a second signal ends the program at once.
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

// nargs checks the number of arguments, and returns a usageError.
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
