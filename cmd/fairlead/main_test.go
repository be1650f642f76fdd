package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	testscript.Main(checked{m}, map[string]func(){"fairlead": main, kubectlName: main, kubectlComplete: main})
}

// checked runs the tests and looks for objects that they left on the host.
type checked struct{ m *testing.M }

func (c checked) Run() int { return testkit.Run(c.m) }

// TestScripts runs the program as its users do. Besides testscript's own there
// are the commands ready SOCKET (waits until an agent answers), hangup NAME and
// interrupt NAME (signal a background command), until COMMAND..., and misused ARGUMENT... (which the
// program must refuse as a usage error, in words that a user knows).
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Condition: func(cond string) (bool, error) {
			return cond == "root" && os.Geteuid() == 0, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"ready": func(ts *testscript.TestScript, _ bool, args []string) {
				c := api.Dial(ts.MkAbs(args[0]))
				defer c.Close()
				patiently(ts, "an agent answers", func() bool {
					st, err := c.Status(context.Background())
					return err == nil && st.Complete
				})
			},
			"hangup":    func(ts *testscript.TestScript, _ bool, args []string) { send(ts, args[0], syscall.SIGHUP) },
			"interrupt": func(ts *testscript.TestScript, _ bool, args []string) { send(ts, args[0], syscall.SIGINT) },
			"misused": func(ts *testscript.TestScript, _ bool, args []string) {
				err := ts.Exec("fairlead", args...)
				errs := ts.ReadFile("stderr")
				if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != cli.Usage || errs == "" || verbtest.GoWords.MatchString(errs) {
					ts.Fatalf("fairlead %q: %v: %s", args, err, errs)
				}
			},
			"until": func(ts *testscript.TestScript, _ bool, args []string) {
				patiently(ts, "it succeeds", func() bool { return ts.Exec(args[0], args[1:]...) == nil })
			},
		},
	})
}

func patiently(ts *testscript.TestScript, what string, ok func() bool) {
	for end := time.Now().Add(90 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("waited in vain until %s", what)
		}
	}
}

func send(ts *testscript.TestScript, name string, sig syscall.Signal) {
	for _, cmd := range ts.BackgroundCmds() {
		if cmd.Process != nil && slices.Contains(cmd.Args, name) {
			ts.Check(cmd.Process.Signal(sig))
			return
		}
	}
	ts.Fatalf("no background command %s", name)
}
