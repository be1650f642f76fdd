package main

import (
	"context"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) {
	testscript.Main(checked{m}, map[string]func(){"fairlead": main, kubectlName: main, kubectlComplete: main})
}

// checked runs the tests and looks for objects that they left on the host.
type checked struct{ m *testing.M }

func (c checked) Run() int { return testkit.Run(c.m) }

// TestScripts runs the program as its users do. Besides testscript's own there
// are the commands ready SOCKET (waits until an agent answers), hangup NAME and
// interrupt NAME (signal a background command), and until COMMAND...
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
