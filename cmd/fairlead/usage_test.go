package main

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// goWords are terms that only a Go programmer understands.
var goWords = regexp.MustCompile(`strconv|context canceled|deadline exceeded|time: |exec: |json: |slog: |invalid argument .* for "|parsing |\bEOF\b|dial tcp|<nil>|%!`)

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
				if status := run(t.Context(), e); status != cli.Usage || goWords.MatchString(errs.String()) || !strings.Contains(errs.String(), f.Name) {
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

// So is the error for any bad argument.
func TestArgumentWords(t *testing.T) {
	for _, args := range [][]string{
		{"reserve", "web", "/dev/vdb", "riops=x"}, {"io", "capacity", "/dev/vdb", "wiops=99999999999999999999"},
		{"agent", "--log-level", "loud", "--config="}, {"traffic", "calibrate", "--to", "192.0.2.1", "--config="},
		{"traffic", "calibrate", "--listen", "nonsense", "--config="}, {"latency", "probe", "--self", "192.0.2.1"},
	} {
		var errs bytes.Buffer
		status := run(t.Context(), cli.Env{Stdout: new(bytes.Buffer), Stderr: &errs, Getenv: func(string) string { return "" }, Args: args})
		if status != cli.Usage || goWords.MatchString(errs.String()) {
			t.Errorf("%q: status %d: %s", args, status, &errs)
		}
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
	status := runVerbs(ctx, cli.Env{Stdout: new(bytes.Buffer), Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{"wait"}}, []func(cli.Env) *cobra.Command{verb})
	if status != cli.Failed || errs.String() != "fairlead wait: interrupted\n" {
		t.Errorf("status %d: %s", status, &errs)
	}
}

// doctor fails where nothing works, and where it cannot find out.
func TestUseless(t *testing.T) {
	finding := func(name, area string, level api.Level) api.Finding {
		return api.Finding{Capability: name, Area: area, Verdict: api.Verdict{Level: level, Why: "no"}}
	}
	root, v2, works := finding("root", "host", api.LevelFull), finding("cgroup-v2", "cgroup", api.LevelFull), finding("netcpu", api.AreaFeatures, api.LevelDegraded)
	for _, tt := range []struct {
		r    api.Report
		want string
	}{
		{api.Report{root, v2, works, finding("traffic", api.AreaFeatures, api.LevelUnavailable)}, ""},
		{api.Report{root, v2, finding("traffic", api.AreaFeatures, api.LevelUnavailable)}, "no feature works here"},
		{api.Report{finding("root", "host", api.LevelUnavailable), v2, works}, "not run as root"},
		{api.Report{root, finding("cgroup-v2", "cgroup", api.LevelUnavailable), works}, "cannot work on this host"},
	} {
		if err := useless(tt.r); (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.r, err, tt.want)
		}
	}
}

// The exit status of set reports whether the new values are in force, in the features concerned.
func TestSetStatus(t *testing.T) {
	for state, want := range map[string]int{
		api.StateDone: cli.Done, api.StatePending: cli.Done, api.StatePartly: cli.Failed, api.StateError: cli.Failed, api.StateUnavailable: cli.Failed,
	} {
		s := &setStub{stub: example(), features: []api.FeatureStatus{{Feature: "traffic", State: state, Error: "two of three devices"}, {Feature: "blockio", State: api.StateUnavailable, Error: "no BTF"}}}
		status, out, errs := against(t, s, "set", "web-1", "net.ceil=1mbit")
		if status != want || (want == cli.Failed) != strings.Contains(errs, "does not hold in full: traffic: ") || strings.Contains(out+errs, "BTF") {
			t.Errorf("%s: status %d: %s%s", state, status, out, errs)
		}
		if status, _, errs := against(t, s, "set", "web-1", "net.ceil-"); status != cli.Done {
			t.Errorf("taken back, %s: status %d: %s", state, status, errs)
		}
	}
}
