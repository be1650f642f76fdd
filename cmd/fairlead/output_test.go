package main

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// stub is an agent that returns fixed values.
type stub struct {
	serve.Backend
	list    []api.Container
	explain api.Explanation
	plan    []api.Planned
	status  api.Status
}

func (s stub) Containers(context.Context) ([]api.Container, error) { return s.list, nil }
func (s stub) Overview(context.Context) (api.Overview, error) {
	return api.Overview{Rows: []api.OverviewRow{{Container: 4711, Slowed: 0.12, By: []api.Slowdown{{Cause: api.SlowedByUplink, Slowed: 0.12}}}}}, nil
}
func (s stub) Explain(context.Context, string) (api.Explanation, error) { return s.explain, nil }
func (s stub) Plan(context.Context, string) ([]api.Planned, error)      { return s.plan, nil }
func (s stub) Status(context.Context) (api.Status, error)               { return s.status, nil }
func (s stub) Restore(_ context.Context, ref string) (api.Restored, error) {
	return api.Restored{Outcomes: []api.Outcome{
		{Kind: "file", Object: "/a", Result: "restored", Before: "1", Wrote: "2"},
		{Kind: "file", Object: "/b\x1b[2J", Result: "foreign", Before: "1", Wrote: "2", Now: "3"},
		{Kind: "file", Object: "/c", Result: "gone"},
		{Kind: "file", Object: "/d", Result: "unchanged", Before: "1"},
		{Kind: "file", Object: "/e", Result: "failed", Before: "1", Error: "no\x07"},
	}}, nil
}

// against runs one verb against a stub and returns its output.
func against(t *testing.T, s serve.Backend, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := serve.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- serve.Serve(ctx, l, s, slog.New(slog.DiscardHandler)) }()
	var out, errs bytes.Buffer
	status = run(ctx, cli.Env{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: append(args, "--socket", path)})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	return status, out.String(), errs.String()
}

const evil = "evil\x1b[31m\u202e\u009b\x7f\n\xff"

// example returns a state as an agent reports it.
func example() stub {
	web := api.Container{
		ID: 4711, Name: "web-1", Source: "docker", Image: "registry.example.com/team/nginx:1.27", PID: 99,
		Started:    time.Now().Add(-3 * time.Minute),
		Interfaces: []api.Interface{{Name: "eth0", Kind: "veth", Addrs: []string{"172.17.0.2/16"}, Host: &api.HostEnd{Name: "veth3f2a1bc", Index: 7, Master: "docker0", NetNS: 12}, Index: 2}},
		NetNS:      11,
		Policy:     []api.Setting{{Key: "fairlead.netcpu", Value: "isolate", From: "/etc/fairlead/policy.d/10-web.yaml", Line: 3}},
		Features:   []api.FeatureStatus{{Feature: "netcpu", State: api.StateDone, Since: time.Now().Add(-2*time.Minute - time.Second)}},
	}
	bad := api.Container{
		ID: 5, Name: evil, Source: "cgroup", HostNetwork: true, Pod: "\U000e0001 \u2028", Namespace: "no",
		Policy:   []api.Setting{{Key: "fairlead.netcpu", Value: "charge", From: "label"}, {Key: "fairlead.net.rate", Value: "1mbit", From: "label"}},
		Features: []api.FeatureStatus{{Feature: "netcpu", State: api.StateError, Error: "open /x\x1b: no\nsuch", Tries: 3}, {Feature: "traffic", State: "unavailable", Error: "fairlead.net.rate=1mbit (label)"}},
	}
	return stub{
		list: []api.Container{web, bad},
		explain: api.Explanation{
			Container: web,
			Changes: []api.Change{
				{Feature: "netcpu", Kind: "offload", Object: "11/2/gro", Before: "off", Wrote: "on", Now: "on", State: api.ChangeInForce, When: time.Now().Add(-121 * time.Second), Because: web.Policy},
				{Feature: "netcpu", Kind: "file", Object: "/sys/x", Before: "", Wrote: "7", Now: evil, State: api.ChangeForeign, When: time.Now().Add(-121 * time.Second)},
			},
		},
		status: api.Status{
			Complete: true, Policy: api.PolicyStatus{OK: true},
			Features: []api.Feature{{Name: "netcpu", Support: api.Verdict{Level: api.LevelDegraded, Why: "no threads", Mend: "threads"}}},
			Sources:  []api.SourceStatus{{Name: "docker", Error: "gone\x1b"}},
		},
	}
}

func compare(t *testing.T, want, got string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

func TestPS(t *testing.T) {
	status, out, errs := against(t, example(), "ps")
	if status != cli.Done || errs != "" {
		t.Fatal(status, errs)
	}
	compare(t, `CONTAINER                 SLOWED BY   SOURCE  NETCPU        IMAGE
web-1                     12% uplink  docker  isolate done  registry.example.co…
"evil\x1b[31m\u202e\u00…  -           cgroup  charge error  -

"evil\x1b[31m\u202e\u009b\x7f\n�": netcpu: "open /x\x1b: no", and 1 more
  (tried 3 times)
"evil\x1b[31m\u202e\u009b\x7f\n�": traffic: unavailable:
  fairlead.net.rate=1mbit (label)
source docker: "gone\x1b"
feature netcpu is degraded: no threads
What to do: `+"`fairlead explain id:5`, then `fairlead doctor`"+`.
`, out)
	for line := range strings.Lines(out) {
		if n := utf8.RuneCountInString(line); n > 81 {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
	if _, out, _ := against(t, example(), "ps", "--wide"); !strings.Contains(out, "registry.example.com/team/nginx:1.27") || !strings.Contains(out, "eth0→veth3f2a1bc") || !strings.Contains(out, "(the host's)") {
		t.Errorf("--wide: %s", out)
	}
}

func TestExplain(t *testing.T) {
	status, out, errs := against(t, example(), "explain", "web-1")
	if status != cli.Done || errs != "" {
		t.Fatal(status, errs)
	}
	compare(t, `web-1 (docker, id 4711, image registry.example.com/team/nginx:1.27)
  runs as process 99, started 3 min ago
  eth0 (veth) 172.17.0.2/16, other end veth3f2a1bc on bridge docker0

What policy says:
  fairlead.netcpu = isolate, /etc/fairlead/policy.d/10-web.yaml line 3

Status:
  netcpu: as policy says, since 2 min

What netcpu changed on the host for it, because of fairlead.netcpu = isolate:
  offload gro of eth0 in the container
      was off, made on 2 min ago, and so it is now

What netcpu changed on the host for it:
  /sys/x
      was "", made 7 2 min ago, but somebody else has made it "evil\x1b[31m\u202e\u009b\x7f\n�" since
`, out)
}

func TestExplainPlan(t *testing.T) {
	x := example()
	because := api.Setting{Key: "fairlead.netcpu", Value: "isolate"}
	x.plan = []api.Planned{
		{Feature: "netcpu", Because: because, Kind: "offload", Object: "11/2/gro", Now: "off", Value: "on"},
		{Feature: "netcpu", Because: because, Kind: "threaded", Object: "11/2/", Now: "1", Value: "1"},
		{Feature: "netcpu", Because: because, Kind: "kthread", Object: "napi/eth0", Value: "/sys/x"},
	}
	status, out, errs := against(t, x, "explain", "web-1", "--plan")
	if status != cli.Done || errs != "" {
		t.Fatal(status, errs)
	}
	compare(t, `What netcpu would change on the host for web-1 with fairlead.netcpu = isolate:
  offload gro of eth0 in the container
      is off, would be on
  threaded NAPI of eth0 in the container
      is 1 already
  control group of each kernel thread that will poll eth0
      would be /sys/x
`, out)
}

func TestObjectText(t *testing.T) {
	c := example().explain.Container
	for _, x := range []struct{ kind, object, want string }{
		{"offload", "11/2/gro", "offload gro of eth0 in the container"},
		{"offload", "12/7/tso", "offload tso of veth3f2a1bc, the other end of eth0"},
		{"threaded", "12/8/", "threaded NAPI of docker0"},
		{"qdisc", "9/3", "root qdisc of docker0"}, {"txqueuelen", "9/3", "queue length of docker0"}, {"forward-priority", "9/0", "priority of forwarded packets (ip_forward_update_priority)"},
		{"pair", "9/3/pair", "veth pair past the network namespace of docker0"},
		{"tc-filter", "9/3/ingress/fl_x", "program fl_x at the ingress hook of docker0"},
		{"rps", "11/2/0", "packet steering (rps_cpus) of queue 0 of eth0 in the container"},
		{"defer", "12/8/gro_flush_timeout", "delay of polls (gro_flush_timeout) of docker0"},
		{"kthread", "17:99:/sys/fs/cgroup/cpu", "control group of kernel thread 17 in /sys/fs/cgroup/cpu"},
		{"affinity", "17:99", "allowed CPUs of kernel thread 17"},
		{"slice", "17:99", "slice, in ns, of kernel thread 17"},
		{"nice", "17:99", "nice value of kernel thread 17"},
		{"file", "/sys/fs/cgroup/x\x1b", `"/sys/fs/cgroup/x\x1b"`},
		{"offload", "gro", "offload gro"}, {"offload", "x/y/z", "offload x/y/z"}, {"kthread", "x:y", "kthread x:y"}, {"new\x07", "thing", `"new\a" thing`},
	} {
		if got := objectText(c, x.kind, x.object, "docker0"); got != x.want {
			t.Errorf("%s %s is %q, want %q", x.kind, x.object, got, x.want)
		}
	}
}

// A device without a known name has no numbers either.
func TestObjectTextUnnamed(t *testing.T) {
	if got := objectText(api.Container{}, "qdisc", "4026531840/8", ""); got != "root qdisc of a device that is not seen any more" {
		t.Errorf("%q", got)
	}
}

// explain shows only settings that policy or a user has set, unless -a asks for the rest.
func TestExplainDefaults(t *testing.T) {
	x := example()
	c := &x.explain.Container
	c.Policy = append(c.Policy, api.Setting{Key: "fairlead.net.weight", Value: "1", From: "default"})
	c.Features[0].State, c.Features[0].Error = api.StateError, "uplink eth0: turn: a\nuplink eth1: turn: b"
	_, out, errs := against(t, x, "explain", "web-1")
	if strings.Contains(out, "net.weight") || !strings.Contains(out, "uplink eth0: turn: a\n      uplink eth1: turn: b\n") {
		t.Errorf("%s%s", out, errs)
	}
	if _, out, errs := against(t, x, "explain", "web-1", "-a"); !strings.Contains(out, "fairlead.net.weight = 1, by default") {
		t.Errorf("-a: %s%s", out, errs)
	}
	c.Policy = c.Policy[1:]
	if _, out, errs := against(t, x, "explain", "web-1"); !strings.Contains(out, "nothing: all is at its default (-a shows what that is)") {
		t.Errorf("%s%s", out, errs)
	}
}

func TestRestoreThroughTheAgent(t *testing.T) {
	status, out, errs := against(t, example(), "restore")
	if status != cli.Failed || !strings.Contains(errs, "some values could not be restored") {
		t.Error(status, errs)
	}
	compare(t, `/a: 1 again, was 2
"/b\x1b[2J": left at 3, which somebody else has set (we wrote 2; before it was 1)
/c: no longer exists
/d: is 1 already
/e: NOT put back to 1: "no\a"
`, out)
}

// JSON and YAML preserve any container name exactly, and no output can send control sequences to a
// terminal.
func TestMachineFormats(t *testing.T) {
	s := example()
	want, err := json.Marshal(s.list)
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"json", "yaml"} {
		status, out, errs := against(t, s, "ps", "-o", format)
		if status != cli.Done || errs != "" {
			t.Fatal(status, errs)
		}
		if i := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x202e) }); i >= 0 {
			t.Errorf("%s: control character at %d: %q", format, i, out[max(0, i-20):i+3])
		}
		var got, expected any
		if format == "json" {
			err = json.Unmarshal([]byte(out), &got)
		} else {
			err = yaml.Unmarshal([]byte(out), &got)
			var data []byte
			data, _ = json.Marshal(got)
			json.Unmarshal(data, &got)
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", format, err, out)
		}
		json.Unmarshal(want, &expected)
		if diff := cmp.Diff(expected, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", format, diff)
		}
	}
}

func TestConfigFile(t *testing.T) {
	for _, x := range []struct{ text, want string }{
		{"", ""},
		{"# nothing\n", ""},
		{"---\nsocket: a\n", ""},
		{"- a\n", `config f:1: must be lines of the form "key: value"`},
		{"word\n", `config f:1: must be lines of the form "key: value"`},
		{"a: b\nsocket: [x]\n", "config f:2: socket: the value must be a word or a number"},
		{"socket: {x: y}\n", "config f:1: socket: the value must be a word or a number"},
		{"socket: a\nsocket: b\n", "already"},
		{"socket: \"a\n", "config f: "},
	} {
		_, err := parseConfig("f", []byte(x.text))
		if x.want == "" && err != nil || x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("%q: %v, want %q", x.text, err, x.want)
		}
	}
	got, err := parseConfig("f", []byte("a: 1\nb: \"x y\"\nc: 127.0.0.1:9643\nd:\ne: true\nf: 'q'\n"))
	want := []setting{{"a", "1", 1}, {"b", "x y", 2}, {"c", "127.0.0.1:9643", 3}, {"d", "", 4}, {"e", "true", 5}, {"f", "q", 6}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(setting{})); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func FuzzConfigFile(f *testing.F) {
	for _, s := range []string{"a: b", "a: [b]", "{a: b}", "? a\n: b", "&x a: *x", "a: |\n  b", "!!str a: b", "a: b\n---\nc: d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		settings, err := parseConfig("f", []byte(s))
		if err == nil {
			for _, x := range settings {
				if x.line < 1 {
					t.Errorf("%q: %+v", s, x)
				}
			}
		}
	})
}

// explain shows a controller's decision with its reason. Names of other containers in the reason
// may contain anything.
func TestExplainDecision(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	s := api.Setting{Key: "fairlead.netcpu", Value: "isolate", From: "controller", Instead: "fairlead.netcpu=auto (label)", Reason: "its packets took 7 % (db 7 %)", Since: now.Add(-5 * time.Second)}
	compare(t, "fairlead.netcpu = isolate, by controller for fairlead.netcpu=auto (label), since 5 s:\n      its packets took 7 % (db 7 %)", setting1(s, now))
	s.Reason = "its packets took 7 % (\x1b[2J\n)"
	if got := setting1(s, now); strings.ContainsAny(got, "\x1b") || strings.Count(got, "\n") != 1 {
		t.Errorf("%q", got)
	}
}

func TestSettingsAreUnderstood(t *testing.T) {
	now := time.Now()
	compare(t, "fairlead.net.ceil = 20mbit (20.0 Mbit/s), by a label of the container", setting1(api.Setting{Key: "fairlead.net.ceil", Value: "20mbit", From: "label"}, now))
	compare(t, "fairlead.latency = True (on), by a label of the container", setting1(api.Setting{Key: "fairlead.latency", Value: "True", From: "label"}, now))
	compare(t, "fairlead.net.weight = 2, by a label of the container", setting1(api.Setting{Key: "fairlead.net.weight", Value: "2", From: "label"}, now))
}
