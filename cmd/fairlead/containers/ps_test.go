package containers

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// An unavailable feature counts for a container that asks for it, whatever the feature's keys are
// called. A column shows the parsed value.
func TestStanding(t *testing.T) {
	c := api.Container{Features: []api.FeatureStatus{{Feature: "traffic", State: api.StateUnavailable, Error: "no HTB"}, {Feature: "netcpu", State: api.StateDone}}}
	if word, notes := standing(c, "traffic"), trouble(c); word != "-" || notes != nil {
		t.Errorf("not asked for: %q, %q", word, notes)
	}
	c.Policy = []api.Setting{{Key: "fairlead.net.rate", Value: "1mbit", From: "label"}, {Key: "fairlead.netcpu", Value: "ISOLATE", From: "label"}}
	if word, notes := standing(c, "traffic"), trouble(c); word != api.StateUnavailable || !slices.Equal(notes, []string{"traffic: unavailable: no HTB"}) {
		t.Errorf("asked for: %q, %q", word, notes)
	}
	testkit.Same(t, "standing", "isolate done", standing(c, "netcpu"))
}

// Every feature has a column, however many there are, and no line is wider than a terminal. A state
// that is not in force is never shown as done.
func TestPSFits(t *testing.T) {
	var st api.Status
	c := api.Container{
		Name: "kube-system/coredns-5d78c9869d-abcde/coredns", Source: "containerd", Image: "registry.k8s.io/coredns/coredns:v1.11.1",
		Policy: []api.Setting{{Key: "fairlead.netcpu", Value: "isolate", From: "label"}},
	}
	for _, name := range []string{"netcpu", "traffic", "latency", "overlay", "blockio"} {
		st.Features = append(st.Features, api.Feature{Name: name})
		c.Features = append(c.Features, api.FeatureStatus{Feature: name, State: api.StatePartly, Error: name + ": not covered: " + strings.Repeat("word ", 40)})
		var out bytes.Buffer
		psTable(&out, []api.Container{c}, st, api.Overview{}, false)
		head, _, _ := strings.Cut(out.String(), "\n")
		if !strings.Contains(head, strings.ToUpper(name)) || strings.Contains(out.String(), "done") || strings.Count(out.String(), "partly") == 0 {
			t.Errorf("with %s:\n%s", name, &out)
		}
		if want := name + ": not covered:"; !strings.Contains(out.String(), want) || strings.Contains(out.String(), name+": "+want) {
			t.Errorf("%q is not there once:\n%s", want, &out)
		}
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
				t.Errorf("a line of %d columns: %s", n, line)
			}
		}
	}
}

// Where there is no room for all, the features that nobody uses go, and names are cut, before a state
// is.
func TestPSUsed(t *testing.T) {
	var st api.Status
	c := api.Container{Name: "kube-system/coredns-5d78c9869d-abcde/coredns", Source: "containerd", Image: "registry.k8s.io/coredns/coredns:v1.11.1"}
	for _, name := range []string{"netcpu", "traffic", "latency", "overlay", "blockio"} {
		st.Features = append(st.Features, api.Feature{Name: name})
		c.Features = append(c.Features, api.FeatureStatus{Feature: name, State: api.StateDone})
	}
	asks := func(keys ...string) (head, row string) {
		t.Helper()
		c.Policy = nil
		for _, k := range keys {
			key, value, _ := strings.Cut(k, "=")
			c.Policy = append(c.Policy, api.Setting{Key: "fairlead." + key, Value: value, From: "label"})
		}
		var out bytes.Buffer
		psTable(&out, []api.Container{c}, st, api.Overview{}, false)
		head, row, _ = strings.Cut(out.String(), "\n")
		return head, row
	}
	head, row := asks("netcpu=isolate")
	if strings.Contains(head, "OVERLAY") || strings.Contains(head, "BLOCKIO") || !strings.Contains(row, "isolate done") || !strings.Contains(row, "kube-system/coredns-5d7") {
		t.Errorf("one is used:\n%s\n%s", head, row)
	}
	head, row = asks("netcpu=isolate", "net.weight=3", "io.yield=auto")
	if !strings.Contains(head, "NETCPU") || !strings.Contains(head, "TRAFFIC") || !strings.Contains(head, "BLOCKIO") || strings.Contains(head, "OVERLAY") || !strings.Contains(row, "isolate done") {
		t.Errorf("three are used:\n%s\n%s", head, row)
	}
}

// The last line states the next step for the user. Problems of policy are said in full.
func TestPSLastLine(t *testing.T) {
	good := api.Container{Name: "web", ID: 7, Features: []api.FeatureStatus{{Feature: "netcpu", State: api.StateDone}}}
	bad := good
	bad.Features = []api.FeatureStatus{{Feature: "netcpu", State: api.StateError, Error: "no"}}
	odd := bad
	odd.Name = "a b"
	ok := api.Status{Complete: true, Policy: api.PolicyStatus{OK: true}, Features: []api.Feature{{Name: "netcpu"}}}
	broken := ok
	broken.Policy.OK = false
	ignored := ok
	ignored.Policy.Problems = []api.Problem{{Container: 7, Text: "is ignored: " + strings.Repeat("word ", 40) + "to the end"}}
	degraded := ok
	degraded.Features = []api.Feature{{Name: "netcpu", Support: api.Verdict{Level: api.LevelDegraded, Why: "no threads", Mend: "threads"}}}
	harmless := ok
	harmless.Features = []api.Feature{{Name: "netcpu", Support: api.Verdict{Level: api.LevelDegraded, Why: "no threads", Mend: "none is needed"}}}
	for _, tt := range []struct {
		c    api.Container
		st   api.Status
		want string
	}{
		{good, ok, ""},
		{bad, ok, "`fairlead explain web`"},
		{odd, ok, "`fairlead explain id:7`"},
		{good, broken, "`fairlead policy check`"},
		{good, ignored, "`fairlead policy check`"},
		{good, harmless, ""},
		{good, degraded, "`fairlead doctor`"},
	} {
		var out bytes.Buffer
		psTable(&out, []api.Container{tt.c}, tt.st, api.Overview{}, false)
		_, last, said := strings.Cut(out.String(), "\nWhat to do: ")
		if said != (tt.want != "") || !strings.Contains(last, tt.want) {
			t.Errorf("want %q:\n%s", tt.want, &out)
		}
		for _, p := range tt.st.Policy.Problems {
			if text := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(text, "policy: "+p.Text) {
				t.Errorf("%q is not said:\n%s", p.Text, &out)
			}
		}
		if body, tail, more := strings.Cut(out.String(), "\n\n"); tt.want == "" && more {
			t.Errorf("below the table is what needs nothing: %s\n%s", tail, body)
		}
	}
}

// cause is one sentence: the first error, without kernel objects and the program's own steps.
func TestCause(t *testing.T) {
	for text, want := range map[string]string{
		"traffic: uplink eth0: turn qdisc to \"htb 666c:\": replace root qdisc of device 2 in netns 4026531840: it already has a shaper of somebody else, which could not be put back: tbf": "uplink eth0: it already has a shaper of somebody else, which could not be put back: tbf",
		"traffic: eth0: busy\neth1: busy\neth2: busy": "eth0: busy, and 2 more",
		"no HTB":                 "no HTB",
		strings.Repeat("x", 900): strings.Repeat("x", 199) + "…",
	} {
		testkit.Same(t, "cause", want, cause(api.FeatureStatus{Feature: "traffic", Error: text}))
	}
}

// A container is shown with its worst neighbour, and the neighbour's name is no escape sequence.
func TestPSSlowedBy(t *testing.T) {
	o := api.Overview{Rows: []api.OverviewRow{
		{Container: 7, Slowed: 0.426, By: []api.Slowdown{{Cause: api.SlowedByPackets, Slowed: 0.4, Culprit: 8, Name: "in\x1b[31mgest"}, {Cause: api.SlowedByCPU, Slowed: 0.026}}},
		{Container: 8, Slowed: 0.25, By: []api.Slowdown{{Cause: api.SlowedByCPU, Slowed: 0.25}}},
		{Container: 9, Slowed: 0.001, By: []api.Slowdown{{Cause: api.SlowedByCPU, Slowed: 0.001}}},
	}}
	for id, want := range map[api.ID]string{7: "43% packets " + cli.Show("in\x1b[31mgest"), 8: "25% cpu", 9: "-", 10: "-"} {
		if got := slowedBy(id, o); got != want || strings.Contains(got, "\x1b") {
			t.Errorf("container %d: %q, want %q", id, got, want)
		}
	}
	var out bytes.Buffer
	psTable(&out, []api.Container{{ID: 8, Name: "web", Source: "docker"}}, api.Status{Complete: true, Policy: api.PolicyStatus{OK: true}}, o, false)
	if head := "CONTAINER  SLOWED BY  SOURCE"; !strings.HasPrefix(out.String(), head) || !strings.Contains(out.String(), "web        25% cpu    docker") {
		t.Errorf("%s", &out)
	}
}
