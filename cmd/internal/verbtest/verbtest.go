// Package verbtest runs verbs of fairlead in the process of a test: against an agent that returns fixed
// values, and on a terminal. Only tests import it.
package verbtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Program runs the verb in e.Args and returns the exit status.
type Program func(ctx context.Context, e cli.Env) int

// Run runs the verb in e.Args as a program that has only these verbs, and returns the
// exit status. flags add those of a feature to the agent's.
func Run(ctx context.Context, verbs []verb.Verb, e cli.Env, flags ...func(*pflag.FlagSet, *agent.FeatureConfig)) int {
	p := cli.Program{Name: "fairlead"}
	for _, v := range verbs {
		p.Verbs = append(p.Verbs, func(e cli.Env) *cobra.Command { return v(verb.Env{Env: e, Flags: flags}) })
	}
	return p.Run(ctx, e)
}

// Stub is an agent that returns fixed values.
type Stub struct {
	serve.Backend
	List      []api.Container
	Explained api.Explanation
	Planned   []api.Planned
	Reported  api.Status

	// Readings are the answers of features, by what they are asked: "traffic", "traffic of web-1 over 1s".
	// Of several answers each is given once, the last again and again. A Failure is an error.
	Readings map[string][]json.RawMessage
}

// moment is a time in the file of a stub: so long ago, or in the local zone.
var moment = regexp.MustCompile(`"(-\d+[smh]|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)"`)

// ReadStub makes a Stub of its JSON.
func ReadStub(t interface{ Fatalf(string, ...any) }, data []byte) (s Stub) {
	data = moment.ReplaceAllFunc(data, func(text []byte) []byte {
		word := strings.Trim(string(text), `"`)
		at, err := time.ParseInLocation("2006-01-02T15:04:05", word, time.Local)
		if ago, no := time.ParseDuration(word); no == nil {
			at, err = time.Now().Add(ago), nil
		}
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return at.AppendFormat(nil, `"`+time.RFC3339Nano+`"`)
	})
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatalf("stub: %v", err)
	}
	return s
}

// Scripts runs the scripts in testdata/script. Besides testscript's own commands there is against FILE
// ARGUMENT..., which runs a verb against the Stub in FILE. With UPDATE in the environment what is
// printed becomes what is wanted.
func Scripts(t *testing.T, run Program) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", UpdateScripts: os.Getenv("UPDATE") != "", Cmds: map[string]func(*testscript.TestScript, bool, []string){
		"against": func(ts *testscript.TestScript, fails bool, args []string) {
			status, out, errs := Against(t, run, ReadStub(ts, []byte(ts.ReadFile(args[0]))), args[1:]...)
			io.WriteString(ts.Stdout(), out)
			io.WriteString(ts.Stderr(), errs)
			if (status != cli.Done) != fails {
				ts.Fatalf("status %d", status)
			}
		},
	}})
}

// Report implements serve.Backend.
func (s Stub) Report(_ context.Context, ask api.Ask) (any, error) {
	key := ask.Feature
	if ask.Container != "" {
		key += " of " + ask.Container
	}
	if ask.Over > 0 {
		key += " over " + ask.Over.String()
	}
	if ask.Body != nil {
		key += fmt.Sprintf(" %+v", ask.Body)
	}
	list := s.Readings[key]
	if len(list) == 0 {
		return nil, fmt.Errorf("no reading %q", key)
	}
	if len(list) > 1 {
		s.Readings[key] = list[1:]
	}
	var f api.Failure
	if json.Unmarshal(list[0], &f); f.Error.Text != "" {
		return nil, &f.Error
	}
	return list[0], nil
}

// Command implements serve.Backend.
func (s Stub) Command(ctx context.Context, ask api.Ask) (any, error) { return s.Report(ctx, ask) }

func (s Stub) Containers(context.Context) ([]api.Container, error) { return s.List, nil }
func (s Stub) Overview(context.Context) (api.Overview, error) {
	return api.Overview{Rows: []api.OverviewRow{{Container: 4711, Slowed: 0.12, By: []api.Slowdown{{Cause: api.SlowedByUplink, Slowed: 0.12}}}}}, nil
}
func (s Stub) Explain(context.Context, string) (api.Explanation, error) { return s.Explained, nil }
func (s Stub) Plan(context.Context, string) ([]api.Planned, error)      { return s.Planned, nil }
func (s Stub) Status(context.Context) (api.Status, error)               { return s.Reported, nil }
func (s Stub) Restore(_ context.Context, ref string) (api.Restored, error) {
	return api.Restored{Outcomes: []api.Outcome{
		{Kind: "file", Object: "/a", Result: "restored", Before: "1", Wrote: "2"},
		{Kind: "file", Object: "/b\x1b[2J", Result: "foreign", Before: "1", Wrote: "2", Now: "3"},
		{Kind: "file", Object: "/c", Result: "gone"},
		{Kind: "file", Object: "/d", Result: "unchanged", Before: "1"},
		{Kind: "file", Object: "/e", Result: "failed", Before: "1", Error: "no\x07"},
	}}, nil
}

// Against runs one verb against an agent and returns its output.
func Against(t *testing.T, run Program, s serve.Backend, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	defer Serve(t, path, s)()
	return Alone(t, run, append(args, "--socket", path)...)
}

// Serve serves an agent at a socket until the function that it returns is called.
func Serve(t *testing.T, path string, s serve.Backend) (stop func()) {
	t.Helper()
	l, err := serve.Listen(path)
	testkit.Must(t, err)
	served := testkit.Background(t, func(ctx context.Context) error { return serve.Serve(ctx, l, s, slog.New(slog.DiscardHandler)) })
	return func() { testkit.Check(t, served()) }
}

// Alone runs one verb without an agent, and returns its output.
func Alone(t *testing.T, run Program, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(t.Context(), cli.Env{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: args})
	return status, out.String(), errs.String()
}

// Ended checks how a verb has ended, and that it has printed these words: to stderr, unless it is done.
func Ended(t *testing.T, want int, words ...string) func(status int, stdout, stderr string) {
	t.Helper()
	return func(status int, stdout, stderr string) {
		t.Helper()
		said := stderr
		if want == cli.Done {
			said = stdout
		}
		if status != want || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(said, w) }) {
			t.Errorf("status %d, want %d and %q:\n%s%s", status, want, words, stdout, stderr)
		}
	}
}

// Prints runs one verb against an agent, which must do no more than print a text.
func Prints(t *testing.T, run Program, s serve.Backend, want string, args ...string) (stdout string) {
	t.Helper()
	status, out, errs := Against(t, run, s, args...)
	if status != cli.Done || errs != "" {
		t.Fatalf("%q: status %d: %s", args, status, errs)
	}
	Compare(t, want, out)
	return out
}

// Evil is a name that would drive a terminal.
const Evil = "evil\x1b[31m\u202e\u009b\x7f\n\xff"

// Example returns a state as an agent of an earlier version reports it.
func Example() Stub {
	web := api.Container{
		ID: 4711, Name: "web-1", Source: "docker", Image: "registry.example.com/team/nginx:1.27", PID: 99,
		Started:    time.Now().Add(-3 * time.Minute),
		Interfaces: []api.Interface{{Name: "eth0", Kind: "veth", Addrs: []string{"172.17.0.2/16"}, Host: &api.HostEnd{Name: "veth3f2a1bc", Index: 7, Master: "docker0", NetNS: 12}, Index: 2}},
		NetNS:      11,
		Policy:     []api.Setting{{Key: "fairlead.netcpu", Value: "isolate", From: "/etc/fairlead/policy.d/10-web.yaml", Line: 3}},
		Features:   []api.FeatureStatus{{Feature: "netcpu", State: api.StateDone, Since: time.Now().Add(-2*time.Minute - time.Second)}},
	}
	bad := api.Container{
		ID: 5, Name: Evil, Source: "cgroup", HostNetwork: true, Pod: "\U000e0001 \u2028", Namespace: "no",
		Policy:   []api.Setting{{Key: "fairlead.netcpu", Value: "charge", From: "label"}, {Key: "fairlead.net.rate", Value: "1mbit", From: "label"}},
		Features: []api.FeatureStatus{{Feature: "netcpu", State: api.StateError, Error: "open /x\x1b: no\nsuch", Tries: 3}, {Feature: "traffic", State: "unavailable", Error: "fairlead.net.rate=1mbit (label)"}},
	}
	return Stub{
		List: []api.Container{web, bad},
		Explained: api.Explanation{
			Container: web,
			Changes: []api.Change{
				{Feature: "netcpu", Kind: "offload", Object: "11/2/gro", Before: "off", Wrote: "on", Now: "on", State: api.ChangeInForce, When: time.Now().Add(-121 * time.Second), Because: web.Policy},
				{Feature: "netcpu", Kind: "file", Object: "/sys/x", Before: "", Wrote: "7", Now: Evil, State: api.ChangeForeign, When: time.Now().Add(-121 * time.Second)},
			},
		},
		Reported: api.Status{
			Complete: true, Policy: api.PolicyStatus{OK: true},
			Features: []api.Feature{{Name: "netcpu", Support: api.Verdict{Level: api.LevelDegraded, Why: "no threads", Mend: "threads"}}},
			Sources:  []api.SourceStatus{{Name: "docker", Error: "gone\x1b"}},
		},
	}
}

// Given gives a flag texts, one after the other, and checks its value then, or what the refusal of one says.
func Given(t *testing.T, flag pflag.Value, texts []string, want, refusal string) {
	t.Helper()
	var errs []error
	for _, s := range texts {
		errs = append(errs, flag.Set(s))
	}
	testkit.Says(t, fmt.Sprint(texts), errors.Join(errs...), refusal)
	if got := flag.String(); refusal == "" && got != want {
		t.Errorf("%q: %s, want %s", texts, got, want)
	}
}

// Compare compares what was printed.
func Compare(t *testing.T, want, got string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

// GoWords are terms that only a Go programmer understands.
var GoWords = regexp.MustCompile(`strconv|context canceled|deadline exceeded|time: |exec: |json: |slog: |invalid argument .* for "|parsing |\bEOF\b|dial tcp|<nil>|%!`)
