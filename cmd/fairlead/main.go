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
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/bench"
)

// version is that of a plain go build; the Makefile has the linker set it.
var version = api.Release + "-dev"

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
		if f.verb != nil {
			list = append(list, f.verb)
		}
	}
	return list
}

// errTold is the error of a verb that has printed the failure itself.
var errTold = errors.New("")

// run runs the verb in e.args and returns the exit status. SIGINT and SIGTERM end the context
// of the verb; a second signal ends the program at once.
func run(ctx context.Context, e env) int { return runVerbs(ctx, e, verbs()) }

func runVerbs(ctx context.Context, e env, verbs []func(env) *cobra.Command) int {
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel)

	const short = "Make a shared host behave, for each container, as if the neighbours were not there"
	var shown bool
	root := &cobra.Command{
		Use:           "fairlead",
		Short:         short,
		Long:          short + ".\n\n" + statusHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknown(cmd, "command", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if shown {
				versionText(e.stdout, agent.VersionOf(version))
				return nil
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVar(&shown, "version", false, "show the version of this program")
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	root.SetHelpCommand(helpVerb(root))
	root.SetFlagErrorFunc(flagError)
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
		fmt.Fprintf(e.stderr, "%s: %s\nsee %s --help\n", cmd.CommandPath(), lines(api.Text(err)), cmd.CommandPath())
		return statusUsage
	}
	fmt.Fprintf(e.stderr, "%s: %s\n", cmd.CommandPath(), lines(api.Text(err)))
	return statusFailed
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
				err = unknown(cmd, "command", rest[0])
			}
			if err != nil {
				return err
			}
			return cmd.Help()
		},
	}
}
