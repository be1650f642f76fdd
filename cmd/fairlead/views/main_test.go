package views

import (
	"context"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	testscript.Main(checked{m}, map[string]func(){"fairlead": func() {
		os.Exit(run(context.Background(), cli.Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Args: os.Args[1:]}))
	}})
}

// checked runs the tests and looks for objects that they left on the host.
type checked struct{ m *testing.M }

func (c checked) Run() int { return testkit.Run(c.m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
