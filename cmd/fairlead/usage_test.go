package main

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

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
		if status, _, errs := verbtest.Against(t, run, s, "set", "web-1", "net.ceil-"); status != cli.Done {
			t.Errorf("taken back, %s: status %d: %s", state, status, errs)
		}
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
