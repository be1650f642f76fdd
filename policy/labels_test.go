package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestParseLabels(t *testing.T) {
	for _, c := range []struct {
		name    string
		labels  map[string]string
		want    Settings
		origins []Origin
		errors  string
	}{
		{name: "none"},
		{name: "not ours", labels: map[string]string{"app": "x", "fairleadx": "1", "com.example/fairlead.netcpu": "isolate"}},
		{
			name:    "valid",
			labels:  map[string]string{"fairlead.netcpu": "isolate", "fairlead.net.rate": "50mbit", "fairlead.latency": "on"},
			want:    Settings{NetCPU: NetCPUIsolate, Egress: Net{Rate: 50e6}, Latency: ptr(true)},
			origins: []Origin{{Key: "fairlead.latency", Value: "on", From: "label"}, {Key: "fairlead.net.rate", Value: "50mbit", From: "label"}, {Key: "fairlead.netcpu", Value: "isolate", From: "label"}},
		},
		{
			name:   "several devices",
			labels: map[string]string{"fairlead.io.reserve": "/dev/vdc riops=1; /dev/vdb wiops=2", "fairlead.io.max": "/dev/vdb rbps=1mb wbps=2mb riops=3"},
			want: Settings{IO: []IO{{Device: "/dev/vdb", Reserved: Figures{WriteIOPS: 2}, Max: Figures{ReadBytes: 1 << 20, WriteBytes: 2 << 20, ReadIOPS: 3}},
				{Device: "/dev/vdc", Reserved: Figures{ReadIOPS: 1}}}},
			origins: []Origin{{Key: "fairlead.io.max", Value: "/dev/vdb rbps=1mb wbps=2mb riops=3", From: "label"}, {Key: "fairlead.io.reserve", Value: "/dev/vdc riops=1; /dev/vdb wiops=2", From: "label"}},
		},
		{
			name:    "one broken",
			labels:  map[string]string{"fairlead.netcpu": "isolate", "fairlead.net.rate": "fast"},
			want:    Settings{NetCPU: NetCPUIsolate},
			origins: []Origin{{Key: "fairlead.netcpu", Value: "isolate", From: "label"}},
			errors:  `fairlead.net.rate: "fast": must start with a decimal number`,
		},
		{
			name:   "unknown",
			labels: map[string]string{"fairlead.netcup": "isolate", "fairlead.": "x"},
			errors: "fairlead.: \"x\": unknown key\nfairlead.netcup: \"isolate\": unknown key; did you mean fairlead.netcpu?",
		},
		{
			// docker-compose 1.29 turns on into True and off into False.
			name: "forms of switches",
			labels: map[string]string{"fairlead.latency": "True", "fairlead.net.latency.split": "ON", "fairlead.overlay": "no",
				"fairlead.io.yield": "False", "fairlead.net.latency": "2MS", "fairlead.netcpu": "Isolate"},
			want: Settings{NetCPU: NetCPUIsolate, Latency: ptr(true), Overlay: ptr(false), IOYield: YieldOff, Egress: Net{Latency: 2e6, Split: true}},
			origins: []Origin{{Key: "fairlead.io.yield", Value: "False", From: "label"}, {Key: "fairlead.latency", Value: "True", From: "label"},
				{Key: "fairlead.net.latency", Value: "2MS", From: "label"}, {Key: "fairlead.net.latency.split", Value: "ON", From: "label"},
				{Key: "fairlead.netcpu", Value: "Isolate", From: "label"}, {Key: "fairlead.overlay", Value: "no", From: "label"}},
		},
		{
			name: "a prefix that is none",
			labels: map[string]string{"Fairlead.net.ceil": "1mbit", "FAIRLEAD.NET.RATE": "1mbit", "fairlead-net-weight": "2", "fairlead/netcpu": "isolate",
				"fairlead_io.weight": "2", "fairlead-team": "shop", "fairlead": "x"},
			errors: `FAIRLEAD.NET.RATE: "1mbit": unknown key; did you mean fairlead.net.rate?
Fairlead.net.ceil: "1mbit": unknown key; did you mean fairlead.net.ceil?
fairlead-net-weight: "2": unknown key; did you mean fairlead.net.weight?
fairlead/netcpu: "isolate": unknown key; did you mean fairlead.netcpu?
fairlead_io.weight: "2": unknown key; did you mean fairlead.io.weight?`,
		},
		{
			name:   "a key without its group",
			labels: map[string]string{"fairlead.ceil": "1mbit", "fairlead.weight": "2", "fairlead.ingress.rate": "1mbit", "fairlead.net.egress.ceil": "1mbit", "fairlead.netcpu.mode": "isolate"},
			errors: `fairlead.ceil: "1mbit": unknown key; did you mean fairlead.net.ceil?
fairlead.ingress.rate: "1mbit": unknown key; did you mean fairlead.net.ingress.rate?
fairlead.net.egress.ceil: "1mbit": unknown key; did you mean fairlead.net.ceil?
fairlead.netcpu.mode: "isolate": unknown key; did you mean fairlead.netcpu?
fairlead.weight: "2": unknown key; did you mean fairlead.net.weight or fairlead.io.weight?`,
		},
		{
			name:    "contradiction",
			labels:  map[string]string{"fairlead.net.rate": "2mbit", "fairlead.net.ceil": "1mbit", "fairlead.net.weight": "2"},
			want:    Settings{Egress: Net{Weight: 2}},
			origins: []Origin{{Key: "fairlead.net.weight", Value: "2", From: "label"}},
			errors:  `fairlead.net.rate: "2mbit": net.rate 2mbit is more than net.ceil 1mbit`,
		},
		{
			name:    "Kubernetes",
			labels:  map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1Gi"},
			want:    Settings{Ingress: Net{Ceil: 10e6}, Egress: Net{Ceil: 1 << 30}},
			origins: []Origin{{Key: "fairlead.net.ceil", Value: "1Gi", From: "annotation"}, {Key: "fairlead.net.ingress.ceil", Value: "10M", From: "annotation"}},
		},
		{
			name:    "ours before Kubernetes'",
			labels:  map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "fairlead.net.ingress.ceil": "20mbit"},
			want:    Settings{Ingress: Net{Ceil: 20e6}},
			origins: []Origin{{Key: "fairlead.net.ingress.ceil", Value: "20mbit", From: "label"}},
		},
		{
			name:   "Kubernetes broken",
			labels: map[string]string{"kubernetes.io/ingress-bandwidth": "10mbit", "kubernetes.io/egress-bandwidth": "1"},
			errors: "kubernetes.io/egress-bandwidth: \"1\": 1bit is not between 1kbit and 1000tbit\n" +
				`kubernetes.io/ingress-bandwidth: "10mbit": unknown unit "mbit"; units are a Kubernetes quantity of bits per second: k, M, G, T, P, Ki, Mi, Gi, Ti, Pi`,
		},
		{
			name: "hostile",
			labels: map[string]string{
				"fairlead.\x1b[2J":     "x",
				"fairlead.netcpu":      "isolate\x00",
				"fairlead.latency":     "on\n\x1b[31mfake: line",
				"fairlead.net.rate":    strings.Repeat("9", 1<<20),
				"fairlead.net.ceil":    strings.Repeat("x", 4097),
				"fairlead.overlay":     "",
				"fairlead.io.reserve":  "/dev/\u202evdb riops=1",
				"fairlead.net.latency": "\xff",
			},
			errors: `"fairlead.\x1b[2J": "x": unknown key
fairlead.io.reserve: "/dev/\u202evdb riops=1": "/dev/\u202evdb" is not a device: must be a plain path below /dev
fairlead.latency: "on\n\x1b[31mfake: line": must be on or off
fairlead.net.ceil: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"... (4097 bytes): is longer than 4096 bytes
fairlead.net.latency: "\xff": must start with a decimal number
fairlead.net.rate: "9999999999999999999999999999999999999999999999999999999999999999"... (1048576 bytes): is longer than 4096 bytes
fairlead.netcpu: "isolate\x00": must be one of observe, charge, isolate, auto
fairlead.overlay: must not be empty`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			settings, origins, errs := ParseLabels(c.labels)
			testkit.Same(t, "settings", c.want, settings)
			testkit.Same(t, "origins", c.origins, origins)
			testkit.Same(t, "errors", c.errors, errs.Error())
		})
	}
}

func TestParseLabelsBoundsErrors(t *testing.T) {
	labels := map[string]string{"fairlead.netcpu": "isolate"}
	for i := range 10000 {
		labels[fmt.Sprintf("fairlead.a%05d", i)] = "x"
	}
	s, _, errs := ParseLabels(labels)
	testkit.Same(t, "the valid label among the broken ones is lost", NetCPUIsolate, s.NetCPU)
	if want := "more than 16 labels are wrong; the rest is not reported"; len(errs) != 17 || errs[16].Error() != want {
		t.Errorf("%d errors, last %v", len(errs), errs[len(errs)-1])
	}
}

// safe fails for text that could do anything to a terminal but be shown.
func safe(t *testing.T, s string) {
	t.Helper()
	for _, r := range s {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u202e' {
			t.Fatalf("unsafe to print: %q", s)
		}
	}
}

func FuzzParseLabels(f *testing.F) {
	f.Add("fairlead.netcpu", "isolate", "fairlead.net.rate", "50mbit")
	f.Add("fairlead.netcpu.reserve", "12.5%", "fairlead.netcpu.steal", "-0.1%")
	f.Add("fairlead.io.reserve", "/dev/vdb riops=2000 wiops=500", "fairlead.io.max", "/dev/vdb riops=1;/dev/vdc rbps=1.5mb")
	f.Add("kubernetes.io/ingress-bandwidth", "1e3", "fairlead.net.ingress.rate", "2kbit")
	f.Add("fairlead.net.ceil", "1kbit", "fairlead.net.rate", "1mbit")
	f.Add("fairlead.\x1b[31m", "\x00", "fairlead.latency", "2\n")
	f.Add("fairlead.net.latency", "0.5s", "fairlead.net.priority", "-1")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		settings, origins, errs := ParseLabels(map[string]string{k1: v1, k2: v2})
		if len(conflicts(settings)) > 0 {
			t.Fatalf("contradictory settings: %+v", settings)
		}
		for _, err := range errs {
			safe(t, err.Error())
		}
		// What is in force can be given again, alone, with the same result.
		again := map[string]string{}
		for _, o := range origins {
			safe(t, o.String())
			name := o.Key
			if o.From == "annotation" {
				name = map[string]string{"fairlead.net.ceil": kubernetesEgress, "fairlead.net.ingress.ceil": kubernetesIngress}[o.Key]
			}
			again[name] = o.Value
		}
		s, os, errs := ParseLabels(again)
		if diff := cmp.Diff(settings, s) + cmp.Diff(origins, os); diff != "" || len(errs) > 0 {
			t.Fatalf("%v %s", errs, diff)
		}
	})
}

func FuzzParseFile(f *testing.F) {
	f.Add([]byte(everything))
	f.Add([]byte("labels: deny\nmatch: {name: '*'}\n"))
	f.Add([]byte("labels: host\nmatch: {name: x}\n---\nlabels: image\n"))
	f.Add([]byte("match: {name: x}\nset:\n  net: {rate: 2mbit, ceil: 1mbit}\n  io.reserve: [/dev/a riops=1, /dev/b wiops=2]\n"))
	f.Add([]byte("a: &x [*x]\n<<: *x\n? - b\n: !!int 3\n%YAML 1.2\n---\n...\n"))
	f.Add([]byte("set: |\n  text\n  more\nmatch: >-\n  folded\n"))
	f.Add([]byte("\"\\e[31m\": \"\\0\\u202e\"\n'': ~\n"))
	f.Add([]byte("- - - {[\n\t"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, problems := ParseFile("f.yaml", data)
		if (p == nil) != (len(problems) > 0) {
			t.Fatalf("policy %v with problems %v", p, problems)
		}
		lines := strings.Count(string(data), "\n") + 1
		for _, pr := range problems {
			safe(t, pr.String())
			if pr.Line < 1 || pr.Column < 1 || pr.Line > lines+1 {
				t.Fatalf("%s: no such place in %d lines", pr, lines)
			}
		}
		if p == nil {
			return
		}
		for _, r := range p.rules {
			if s, origins := r.layer.settings(); len(conflicts(s)) > 0 || len(origins) != len(r.layer) {
				t.Fatalf("contradictory settings: %+v", s)
			}
		}
	})
}

func ParseLabels(labels map[string]string) (Settings, []Origin, Problems) {
	ls := parseLabels(labels, nil, func(Key) bool { return true })
	settings, origins := ls.layer.settings()
	return settings, origins, ls.problems
}

// TestLeftOut has labels that were too long, or too many, to be read.
func TestLeftOut(t *testing.T) {
	p := parseOne(t, "10.yaml", "match: {labels: {tier: \"*\"}}\nset: {net.rate: 9mbit}\n")
	for _, c := range []struct {
		name    string
		labels  map[string]string
		leftOut map[string]int
		want    Settings
		says    string
	}{
		{name: "not ours", leftOut: map[string]int{"kubectl.kubernetes.io/last-applied-configuration": 100000}},
		{
			name: "too long", leftOut: map[string]int{"fairlead.netcpu": 5000, "fairlead.nonsense": 5000},
			labels: map[string]string{"fairlead.net.rate": "1mbit"}, want: Settings{Egress: Net{Rate: 1e6}},
			says: "container \"web\" (7): fairlead.netcpu: label of 5000 bytes is ignored: the most is 4096, with its name\n" +
				"container \"web\" (7): fairlead.nonsense: label of 5000 bytes is ignored: the most is 4096, with its name",
		},
		{
			name: "too many", leftOut: map[string]int{"fairlead.netcpu": 22},
			says: "container \"web\" (7): fairlead.netcpu: label is ignored: the container has more than 1024, or more than 262144 bytes of them",
		},
		{
			name: "in place of an annotation", leftOut: map[string]int{"fairlead.net.ceil": 5000},
			labels: map[string]string{kubernetesEgress: "10M"},
			says:   "container \"web\" (7): fairlead.net.ceil: label of 5000 bytes is ignored: the most is 4096, with its name",
		},
		{
			name: "an annotation beside the label", leftOut: map[string]int{kubernetesEgress: 5000},
			labels: map[string]string{"fairlead.net.ceil": "1mbit"}, want: Settings{Egress: Net{Ceil: 1e6}},
			says: "container \"web\" (7): kubernetes.io/egress-bandwidth: label of 5000 bytes is ignored: the most is 4096, with its name",
		},
		{
			name: "matched by a file", leftOut: map[string]int{"tier": 5000},
			says: "container \"web\" (7): tier: no policy file can match it: label of 5000 bytes is ignored: the most is 4096, with its name",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			targets, problems := p.Resolve([]container.Container{{ID: 7, Name: "web", Labels: c.labels, LeftOut: c.leftOut}})
			var lines []string
			for _, p := range problems {
				lines = append(lines, p.String())
			}
			testkit.Same(t, "problems", c.says, strings.Join(lines, "\n"))
			if got := targets[0].Settings; got.Egress != c.want.Egress || got.NetCPU != c.want.NetCPU {
				t.Errorf("settings %+v, want %+v", got, c.want)
			}
		})
	}
}

// TestLeftOutKeepsLastGood has a label grow too long.
func TestLeftOutKeepsLastGood(t *testing.T) {
	s := NewStore(t.TempDir(), nil)
	good := container.Container{ID: 7, Labels: map[string]string{"fairlead.netcpu": "isolate"}}
	bad := container.Container{ID: 7, LeftOut: map[string]int{"fairlead.netcpu": 5000}}
	for _, c := range []container.Container{good, bad} {
		if targets, _ := s.Resolve([]container.Container{c}); targets[0].Settings.NetCPU != NetCPUIsolate {
			t.Errorf("with %+v it is %q", c, targets[0].Settings.NetCPU)
		}
	}
}

// TestTrustImages: where the builder is the operator, labels of images are labels.
func TestTrustImages(t *testing.T) {
	c := container.Container{ID: 1, Name: "web", Source: "docker", Labels: map[string]string{"fairlead.net.ceil": "2mbit"},
		ImageLabels: map[string]string{"fairlead.netcpu": "isolate", "fairlead.net.ceil": "1mbit", "tier": "gold"}}
	for _, trusting := range []bool{false, true} {
		s := NewStore(t.TempDir(), nil)
		s.use(join(t, "match: {labels: {tier: gold}}\nset: {net.weight: 3}\n"), nil, time.Time{}, time.Time{})
		if trusting {
			s.TrustImages()
		}
		targets, problems := s.Resolve([]container.Container{c})
		want, wrong := Settings{Egress: Net{Ceil: 2e6}}, 3
		if trusting {
			want, wrong = Settings{NetCPU: NetCPUIsolate, Egress: Net{Ceil: 2e6, Weight: 3}}, 0
		}
		if diff := cmp.Diff(want, targets[0].Settings); diff != "" || len(problems) != wrong {
			t.Errorf("trusting %v: %s%v", trusting, diff, problems)
		}
		for _, p := range problems {
			if !strings.Contains(p.String(), "if it is yours, ") {
				t.Errorf("no remedy in %s", p)
			}
		}
	}
	testkit.Same(t, "what the Set has published was changed", "", c.Labels["tier"])
}
