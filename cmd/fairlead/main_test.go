package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
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

const examples = "../../examples"

// Each policy file is valid by itself, and all are valid as one directory.
func TestExamplesPolicy(t *testing.T) {
	dir := filepath.Join(examples, "policy.d")
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	for _, file := range append(files, dir) {
		if status := run(t.Context(), cli.Env{Stdout: t.Output(), Stderr: t.Output(), Getenv: os.Getenv, Args: []string{"policy", "check", file}}); status != cli.Done {
			t.Errorf("%s is not good", file)
		}
	}
}

// Each service in the Compose file has labels, and all of them count.
func TestExamplesCompose(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(examples, "compose.yaml"))
	must(t, err)
	var compose struct {
		Services map[string]struct{ Labels map[string]string }
	}
	must(t, yaml.Unmarshal(data, &compose))
	var containers []container.Container
	for name, s := range compose.Services {
		containers = append(containers, container.Container{ID: container.ID(len(containers) + 1), Name: name, Labels: s.Labels})
	}
	if len(containers) == 0 {
		t.Fatal("the Compose file has no services")
	}
	targets, problems := new(policy.Policy).Resolve(containers)
	for _, p := range problems {
		t.Errorf("%s: %v", p.Name, p)
	}
	for _, target := range targets {
		if n := len(target.Container.Labels); n == 0 || len(target.Origins) != n {
			t.Errorf("%s: %d labels set %d keys: %v", target.Container.Name, n, len(target.Origins), target.Origins)
		}
	}
}

// The drop-in replaces the unit's command by one with flags that the agent has.
func TestExamplesDropIn(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(examples, "fairlead.service.d/override.conf"))
	must(t, err)
	unit, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	values := map[string][]string{}
	for line := range strings.Lines(string(data)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || strings.HasPrefix(key, "#") {
			continue
		}
		values[key] = append(values[key], value)
		if !bytes.Contains(unit, fmt.Appendf(nil, "\n%s=", key)) {
			t.Errorf("the unit has no %s= that the drop-in could change", key)
		}
	}
	commands := values["ExecStart"]
	if len(commands) != 2 || commands[0] != "" || !bytes.Contains(unit, []byte("\nExecStart=/usr/bin/fairlead agent\n")) {
		t.Fatalf("ExecStart= is %q, want an empty line and a command in place of the unit's", commands)
	}
	args, ok := strings.CutPrefix(commands[1], "/usr/bin/fairlead agent ")
	if !ok {
		t.Fatalf("%q does not start the agent", commands[1])
	}
	_, flags := verb.NewAgentFlags(env(cli.Env{Getenv: os.Getenv}))
	must(t, flags.Parse(strings.Fields(args)))
}

// The error for any bad flag value is in words that a user knows.
func TestFlagWords(t *testing.T) {
	discard := cli.Env{Stdout: new(bytes.Buffer), Stderr: new(bytes.Buffer), Getenv: func(string) string { return "" }}
	tried := 0
	var walk func(path []string, cmd *cobra.Command)
	walk = func(path []string, cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			walk(append(path[:len(path):len(path)], sub.Name()), sub)
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			for _, value := range []string{"n0/n=sense", "99999999999999999999", "-1.5x"} {
				if f.Value.Type() == "string" || f.Value.Set(value) == nil {
					continue
				}
				var errs bytes.Buffer
				e := discard
				e.Stderr, e.Args = &errs, append(path[:len(path):len(path)], "--"+f.Name+"="+value)
				tried++
				if status := run(t.Context(), e); status != cli.Usage || verbtest.GoWords.MatchString(errs.String()) || !strings.Contains(errs.String(), f.Name) {
					t.Errorf("%q: status %d: %s", e.Args, status, &errs)
				}
			}
		})
	}
	for _, verb := range verbs() {
		cmd := verb(discard)
		walk([]string{cmd.Name()}, cmd)
	}
	if tried < 50 {
		t.Errorf("only %d were tried", tried)
	}
}

// spoken finds the verbs in what users read.
var spoken = regexp.MustCompile("(?:`|see )(?:kubectl )?fairlead ([a-z]+)")

// Documents, alerts and messages name no verb that does not exist.
func TestVerbsNamed(t *testing.T) {
	known := []string{"help", "completion"}
	for _, verb := range verbs() {
		known = append(known, verb(cli.Env{Getenv: func(string) string { return "" }}).Name())
	}
	found := 0
	must(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && (d.Name() == "build" || d.Name() == ".git") {
				return fs.SkipDir
			}
			return err
		}
		if ext := filepath.Ext(path); !slices.Contains([]string{".md", ".yml", ".yaml", ".go"}, ext) || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			for _, m := range spoken.FindAllStringSubmatch(line, -1) {
				if found++; !slices.Contains(known, m[1]) {
					t.Errorf("%s: no verb %s: %s", path, m[1], line)
				}
			}
		}
		return err
	}))
	if found < 50 {
		t.Errorf("only %d were found", found)
	}
}

// An interrupted verb reports the interrupt, and does not mention a context.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var errs bytes.Buffer
	verb := func(cli.Env) *cobra.Command {
		return &cobra.Command{Use: "wait", RunE: func(cmd *cobra.Command, _ []string) error {
			cancel()
			<-cmd.Context().Done()
			return cmd.Context().Err()
		}}
	}
	status := program([]func(cli.Env) *cobra.Command{verb}).Run(ctx, cli.Env{Stdout: new(bytes.Buffer), Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{"wait"}})
	if status != cli.Failed || errs.String() != "fairlead wait: interrupted\n" {
		t.Errorf("status %d: %s", status, &errs)
	}
}

// The exit status of set reports whether the new values are in force, in the features concerned.
func TestSetStatus(t *testing.T) {
	for state, want := range map[string]int{
		api.StateDone: cli.Done, api.StatePending: cli.Done, api.StatePartly: cli.Failed, api.StateError: cli.Failed, api.StateUnavailable: cli.Failed,
	} {
		s := &setStub{Stub: verbtest.Example(), features: []api.FeatureStatus{{Feature: "traffic", State: state, Error: "two of three devices"}, {Feature: "blockio", State: api.StateUnavailable, Error: "no BTF"}}}
		status, out, errs := verbtest.Against(t, run, s, "set", "web-1", "net.ceil=1mbit")
		if status != want || (want == cli.Failed) != strings.Contains(errs, "does not hold in full: traffic: ") || strings.Contains(out+errs, "BTF") {
			t.Errorf("%s: status %d: %s%s", state, status, out, errs)
		}
		verbtest.Ended(t, cli.Done)(verbtest.Against(t, run, s, "set", "web-1", "net.ceil-"))
	}
}

// setStub is an agent that changes nothing, and reports success.
type setStub struct {
	verbtest.Stub
	features []api.FeatureStatus
	reserved []string // containers with a requested reservation
}

func (s *setStub) Set(context.Context, string, serve.Peer, api.SetRequest) (api.Container, error) {
	c := s.List[0]
	c.Features = s.features
	return c, nil
}

func (s *setStub) Restore(context.Context, string) (api.Restored, error) {
	return api.Restored{Container: 4711, Name: "web-1", Source: "docker", Outcomes: []api.Outcome{}}, nil
}

func (s *setStub) Report(_ context.Context, ask api.Ask) (any, error) {
	change, ok := ask.Body.(api.ReservationChange)
	if !ok {
		return api.BlockIO{Reservations: []api.Reservation{{ID: "4711-254-16", Container: 4711, Name: "web-1", Device: "/dev/vdb"}}}, nil
	}
	if change.Device == "/dev/vdb" && change.Replace {
		s.reserved = append(s.reserved, ask.Container)
	}
	return api.SetRequest{}, nil
}

func (s *setStub) Command(ctx context.Context, ask api.Ask) (any, error) { return s.Report(ctx, ask) }

// Every verb that changes a container names it.
func TestWhom(t *testing.T) {
	for _, args := range [][]string{
		{"set", "web-1", "net.ceil=1mbit"}, {"restore", "web-1"}, {"reserve", "web-1", "/dev/vdb", "riops=5"}, {"reserve", "--end", "4711-254-16"},
	} {
		s := &setStub{Stub: verbtest.Example()}
		status, out, errs := verbtest.Against(t, run, s, args...)
		if status != cli.Done || errs != "" || !strings.Contains(out, "web-1") || !strings.Contains(out, "4711") {
			t.Errorf("%v: %d\n%s%s", args, status, out, errs)
		}
		// The agent resolves the container's name; the verb does not search a list.
		if args[0] == "reserve" && args[1] == "web-1" && !slices.Equal(s.reserved, []string{"web-1"}) {
			t.Errorf("reserved for %q", s.reserved)
		}
	}
}
