package policy

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func ptr[T any](v T) *T { return &v }

// everything sets every key, in both forms.
const everything = `# comment
labels: allow
policies:
  - match: {name: "web-*", image: ["nginx:*", "*/nginx:*"], labels: {app: x, "example.com/tier": "front*"}, namespace: prod, pod: "web-?"}
    set:
      net:
        rate: 50mbit
        ceil: 200mbit
        weight: 2
        priority: 3
        latency: 2ms
        ingress: {rate: 1.5gbit, ceil: "2gbit"}
      net.ingress.weight: 4
      net.ingress.priority: 0
      net.ingress.latency: 0.5s
      net.latency.split: on
      net.ingress.latency.split: off
      netcpu: isolate
      netcpu.reserve: 12.5%
      netcpu.steal: 0.5%
      latency: off
      overlay: true
      io.reserve:
        - /dev/vdb riops=2000 wiops=500
        - /dev/vdc wiops=7
      io:
        weight: 200
        max: /dev/vdb rbps=50mb wiops=500
        yield: auto
        interrupts: apart
        help: weight
        realtime: 100ms
---
match:
  name: db
set: {netcpu: auto}
`

var everythingSettings = Settings{
	Egress:  Net{Rate: 50e6, Ceil: 200e6, Weight: 2, Priority: ptr(3), Latency: 2 * time.Millisecond, Split: true},
	Ingress: Net{Rate: 1.5e9, Ceil: 2e9, Weight: 4, Priority: ptr(0), Latency: 500 * time.Millisecond},
	NetCPU:  NetCPUIsolate, NetCPUReserve: ptr(0.125), NetCPUSteal: ptr(0.005),
	Latency:  ptr(false),
	Overlay:  ptr(true),
	IOWeight: 200,
	IOYield:  YieldAuto, Interrupts: InterruptsApart, IOHelp: HelpWeight, Realtime: 100 * time.Millisecond,
	IO: []IO{
		{Device: "/dev/vdb", Reserved: Figures{ReadIOPS: 2000, WriteIOPS: 500}, Max: Figures{WriteIOPS: 500, ReadBytes: 50 << 20}},
		{Device: "/dev/vdc", Reserved: Figures{WriteIOPS: 7}},
	},
}

func parseOne(t *testing.T, name, text string) *Policy {
	t.Helper()
	p, problems := ParseFile(name, []byte(text))
	if len(problems) > 0 {
		t.Fatalf("ParseFile: %v", Problems(problems))
	}
	return p
}

func TestParseFileEverything(t *testing.T) {
	for _, text := range []string{everything, strings.ReplaceAll(everything, "\n", "\r\n")} {
		p := parseOne(t, "all.yaml", text)
		if p.Len() != 2 {
			t.Fatalf("Len = %d, want 2", p.Len())
		}
		web := container.Container{ID: 2, Name: "web-1", Image: "docker.io/nginx:1.27", Namespace: "prod", Pod: "web-x",
			Labels: map[string]string{"app": "x", "example.com/tier": "frontend"}}
		targets, problems := p.Resolve([]container.Container{web, {ID: 1, Name: "db"}})
		if len(problems) > 0 {
			t.Fatalf("Resolve: %v", Problems(problems))
		}
		testkit.Same(t, "db", Settings{NetCPU: NetCPUAuto}, targets[0].Settings)
		testkit.Same(t, "web-1", everythingSettings, targets[1].Settings)
		if got, want := len(targets[1].Origins), len(schema); got != want {
			t.Errorf("%d origins, want one for each of the %d keys", got, want)
		}
		want := Origin{Key: "fairlead.io.reserve", Value: "/dev/vdb riops=2000 wiops=500; /dev/vdc wiops=7", From: "all.yaml", Line: 24}
		testkit.Same(t, "origin", want, targets[1].Origins[4])
	}
}

// TestCheck holds the texts that users read, exactly.
func TestCheck(t *testing.T) {
	set := func(s string) string { return "match: {name: x}\nset:\n  " + s + "\n" }
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"# nothing\n---\n", ""},
		{"labels: deny\nmatch: {name: \"*\"}\n", ""},
		{set("net.rate: 50"), `f.yaml:3:13: net.rate: "50": 50bit is not between 1kbit and 1000tbit`},
		{set("net.rate: 2000tbit"), `f.yaml:3:13: net.rate: "2000tbit": 2000tbit is not between 1kbit and 1000tbit`},
		{"match: {runtime: [docker, dokcer]}\nset: {netcpu: auto}\n", `f.yaml:1:9: match.runtime: "dokcer": must be one of docker, podman, containerd, cri-o, sandbox, cgroup`},
		{"match: {runtime: \"*\"}\nset: {netcpu: auto}\n", ""},
		{set("net.rate:"), `f.yaml:3:3: net.rate: must be given a value`},
		{set("net.rate: [1mbit]"), `f.yaml:3:3: net.rate: must be one value, not a list`},
		{set("net.rate: {x: 1}"), `f.yaml:3:3: net.rate: must be a value, not a mapping`},
		{set("net.rat: 1mbit"), `f.yaml:3:3: net.rat: unknown key; did you mean net.rate?`},
		{set("colour: blue"), `f.yaml:3:3: colour: unknown key`},
		{set("fairlead.netcpu: isolate"), `f.yaml:3:3: fairlead.netcpu: unknown key: in a file the keys have no prefix "fairlead."`},
		{set("net: 1mbit"), `f.yaml:3:3: net: is a group of keys: net.rate, net.ceil, net.weight, net.priority, net.latency, net.latency.split, net.ingress.rate, net.ingress.ceil, net.ingress.weight, net.ingress.priority, net.ingress.latency, net.ingress.latency.split`},
		{set("net: {bandwidth: 1mbit}"), `f.yaml:3:9: net.bandwidth: unknown key`},
		{set("net.weight: 0"), `f.yaml:3:15: net.weight: "0": must be between 1 and 10000`},
		{set("net.weight: 1.5"), `f.yaml:3:15: net.weight: "1.5": must be a whole number`},
		{set("net.weight: 0x10"), `f.yaml:3:15: net.weight: "0x10": must be a whole number`},
		{set("net.priority: 65536"), `f.yaml:3:17: net.priority: "65536": must be between 0 and 65535`},
		{set("net.latency: 2min"), `f.yaml:3:16: net.latency: "2min": unknown unit "min"; units are us, ms, s`},
		{set("net.latency: 1us"), `f.yaml:3:16: net.latency: "1us": must be between 10us and 10s`},
		{set("netcpu.reserve: 101%"), `f.yaml:3:19: netcpu.reserve: "101%": must not be more than 100%`},
		{set("netcpu.reserve: 100%"), `f.yaml:3:19: netcpu.reserve: "100%": must be between 0% and 99%`},
		{set("netcpu.reserve: much"), `f.yaml:3:19: netcpu.reserve: "much": must start with a decimal number`},
		{set("netcpu.reserve: 5ms"), `f.yaml:3:19: netcpu.reserve: "5ms": unknown unit "ms"; units are %`},
		{set("netcpu.steal: 0.05%"), `f.yaml:3:17: netcpu.steal: "0.05%": must be 0%, or between 0.1% and 100%`},
		{set("netcpu: on"), `f.yaml:3:11: netcpu: "on": must be one of observe, charge, isolate, auto`},
		{set("latency: maybe"), `f.yaml:3:12: latency: "maybe": must be on or off`},
		{set(`overlay: ""`), `f.yaml:3:12: overlay: must not be empty`},
		{set("io.weight: 10001"), `f.yaml:3:14: io.weight: "10001": must be between 1 and 10000`},
		{set("io.reserve: vdb riops=1"), `f.yaml:3:15: io.reserve: "vdb riops=1": "vdb" is not a device: must be a plain path below /dev`},
		{set("io.reserve: /dev/../etc riops=1"), `f.yaml:3:15: io.reserve: "/dev/../etc riops=1": "/dev/../etc" is not a device: must be a plain path below /dev`},
		{set("io.reserve: /dev/vdb riops=1;"), `f.yaml:3:15: io.reserve: "/dev/vdb riops=1;": must be a device and figures, like "/dev/vdb riops=2000"`},
		{set("io.reserve: /dev/vdb"), `f.yaml:3:15: io.reserve: "/dev/vdb": /dev/vdb has no figures; known are rbps, wbps, riops, wiops`},
		{set("io.reserve: /dev/vdb bps=1mb"), `f.yaml:3:15: io.reserve: "/dev/vdb bps=1mb": unknown figure "bps"; known are rbps, wbps, riops, wiops`},
		{set("io.reserve: /dev/vdb riops=1 riops=2"), `f.yaml:3:15: io.reserve: "/dev/vdb riops=1 riops=2": riops is given twice for /dev/vdb`},
		{set("io.reserve: /dev/vdb riops"), `f.yaml:3:15: io.reserve: "/dev/vdb riops": "riops" is not of the form name=number, without blanks`},
		{set("io.reserve: /dev/vdb riops=0"), `f.yaml:3:15: io.reserve: "/dev/vdb riops=0": riops="0": must be between 1 and 100000000`},
		{set("io.max: [/dev/vdb rbps=1mb, /dev/vdc rbps=1x]"), `f.yaml:3:31: io.max: "/dev/vdc rbps=1x": rbps="1x": unknown unit "x"; units are b, k, kb, m, mb, g, gb, kbit, mbit, gbit`},
		{set("io.max: [/dev/vdb rbps=1mb, /dev/vdb wbps=1mb]"), `f.yaml:3:12: io.max: "/dev/vdb rbps=1mb; /dev/vdb wbps=1mb": /dev/vdb is given twice`},
		{set("io.max: []"), `f.yaml:3:3: io.max: must not be an empty list`},
		{set("net: {rate: 2mbit}\n  net.rate: 3mbit"), `f.yaml:4:3: net.rate: is given twice, first in line 3`},
		{set("netcpu: auto\n  netcpu: auto"), `f.yaml:4:3: netcpu: is given twice, first in line 3`},
		{set("net.rate: 300mbit\n  net.ceil: 200mbit"), `f.yaml:4:13: net.ceil: "200mbit": net.rate 300mbit is more than net.ceil 200mbit`},
		{set("net.ingress: {ceil: 2mbit, rate: 3mbit}"), `f.yaml:3:36: net.ingress.rate: "3mbit": net.ingress.rate 3mbit is more than net.ingress.ceil 2mbit`},
		{set("io.max: /dev/vdb wiops=5\n  io.reserve: /dev/vdb wiops=6"), `f.yaml:4:15: io.reserve: "/dev/vdb wiops=6": io.reserve /dev/vdb wiops=6 is more than io.max wiops=5`},
		{set("{}"), `f.yaml:2:1: set: must not be empty`},
		{"match: {name: x}\n", `f.yaml:1:1: set: is missing`},
		{"set: {netcpu: auto}\n", `f.yaml:1:1: match: is missing; match: {name: "*"} is every container`},
		{"match: {}\nset: {netcpu: auto}\n", `f.yaml:1:1: match: must name at least one of name, image, labels, namespace, pod, runtime`},
		{"match: x\nset: {netcpu: auto}\n", `f.yaml:1:1: match: must be a mapping, like {name: "web-*"}`},
		{"match: {nmae: x}\nset: {netcpu: auto}\n", `f.yaml:1:9: match.nmae: unknown key; did you mean name?`},
		{"match: {name: \"\"}\nset: {netcpu: auto}\n", `f.yaml:1:15: match.name: a pattern must have between 1 and 256 bytes`},
		{"match: {labels: {app: }}\nset: {netcpu: auto}\n", `f.yaml:1:18: match.labels.app: must be given a value`},
		{"labels: maybe\n", `f.yaml:1:9: labels: "maybe": must be allow, deny, host or image`},
		{"labels: deny\n---\nlabels: allow\n", `f.yaml:3:1: labels: is given twice, first in line 1; it holds for the whole file`},
		{"policies:\n  - match: {name: x}\n    labels: deny\n    set: {netcpu: auto}\n", `f.yaml:3:5: labels: belongs at the top of the file: it holds for the whole file`},
		{"policies: {}\n", `f.yaml:1:1: policies: must be a list of mappings with match and set`},
		{"polices: []\n", `f.yaml:1:1: polices: unknown key; did you mean policies?`},
		{"policies: []\nmatch: {name: x}\nset: {netcpu: auto}\n", `f.yaml:2:1: policies: cannot stand beside match and set in one document`},
		{"just text\n", `f.yaml:1:1: must be a mapping with the keys labels, policies, match, set`},
		{"a: &x 1\nb: *x\n", "f.yaml:1:4: YAML anchors, aliases and merge keys are not supported in policy files\nf.yaml:2:4: YAML anchors, aliases and merge keys are not supported in policy files"},
		{"match: !!map {}\n", "f.yaml:1:8: YAML tags are not supported in policy files"},
		{"match: {name: \xff}\n", "f.yaml:1:15: is not UTF-8"},
		{"match: {name: \x00}\n", "f.yaml:1:15: control character U+0000"},
		{"match: {name: \x1b[31m}\n", "f.yaml:1:15: control character U+001B"},
		{"set: [\n", "f.yaml:1:6: is not YAML: sequence end token ']' not found"},
		{strings.Repeat("[", 20000), "f.yaml:1:17: is nested too deeply"},
		{strings.Repeat("- ", 20000), "f.yaml:1:33: is nested too deeply"},
		{strings.Repeat("a:\n", 15000), "f.yaml:10001:1: is too much for one file; split it"},
		{strings.Repeat("#", MaxFileSize+1), "f.yaml:1:1: is larger than 65536 bytes"},
		{"\"\\e[31m\": 1\n", `f.yaml:1:1: "\x1b[31m": unknown key`},
		// All problems of the file at once, in the order of the lines.
		{set("net.rate: 1\n  netcpu: no\n  foo: 1") + "---\nbar: 1\n", `f.yaml:3:13: net.rate: "1": 1bit is not between 1kbit and 1000tbit
f.yaml:4:11: netcpu: "no": must be one of observe, charge, isolate, auto
f.yaml:5:3: foo: unknown key
f.yaml:7:1: bar: unknown key`},
	} {
		testkit.Same(t, "Check("+quote(c.text)+")", c.want, Problems(Check("f.yaml", []byte(c.text))).Error())
	}
}

func TestCheckBoundsProblems(t *testing.T) {
	var b strings.Builder
	for i := range 500 {
		fmt.Fprintf(&b, "k%d: 1\n", i)
	}
	ps := Check("f.yaml", []byte(b.String()))
	if len(ps) != maxProblems+1 || ps[maxProblems].Reason != "has more than 100 problems; the rest is not reported" {
		t.Errorf("%d problems, last %v", len(ps), ps[len(ps)-1])
	}
	b.Reset()
	b.WriteString("policies:\n")
	for range maxRules + 1 {
		b.WriteString("- {match: {name: x}, set: {netcpu: auto}}\n")
	}
	want := "f.yaml:1002:4: more than 1000 policies in one file"
	if got := Problems(Check("f.yaml", []byte(b.String()))).Error(); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"*", "", true}, {"*", "a/b", true}, {"?", "", false}, {"?", "a", true}, {"a", "a", true}, {"a", "b", false}, {"a", "ab", false},
		{"web-*", "web-1", true}, {"web-*", "xweb-1", false}, {"*/nginx:*", "docker.io/library/nginx:1", true},
		{"a*b*c", "aXXbYYbZc", true}, {"a*b*c", "aXXbYYbZ", false}, {"**", "x", true}, {"a?c*", "abc", true},
	} {
		testkit.Same(t, fmt.Sprintf("glob(%q, %q)", c.pattern, c.s), c.want, glob(c.pattern, c.s))
	}
}

func TestMatchUnknown(t *testing.T) {
	for field, want := range map[string]bool{"name": true, "image": false, "namespace": false, "pod": false} {
		p := parseOne(t, "f.yaml", "match: {"+field+`: "*"}`+"\nset: {netcpu: isolate}\n")
		targets, _ := p.Resolve([]container.Container{{ID: 1}})
		testkit.Same(t, field+": \"*\" holds for an unknown one", want, targets[0].Settings.NetCPU == NetCPUIsolate)
	}
}

// Check lists all that is wrong with one policy file; nil if it is valid.
func Check(name string, data []byte) []Problem {
	_, problems := ParseFile(name, data)
	return problems
}

// TestMatchImage: a pattern means the image, however it was written when the
// container was started.
func TestMatchImage(t *testing.T) {
	digest := "sha256:" + strings.Repeat("ab", 32)
	id := "4bb46517cac3"
	for _, c := range []struct {
		image string
		names []string
		yes   string
		no    string
	}{
		{image: "nginx",
			yes: "nginx nginx:* nginx:latest docker.io/library/nginx docker.io/library/nginx:latest docker.io/* */nginx:* n?inx *",
			no:  "nginx:1.* ngin library/nginx:1 quay.io/*"},
		{image: "nginx:1.25", yes: "nginx:* nginx:1.* docker.io/library/nginx:1.25 */nginx:*", no: "nginx nginx:latest docker.io/library/nginx"},
		{image: "docker.io/library/nginx:latest", yes: "nginx nginx:* docker.io/library/nginx:*", no: "nginx:1.*"},
		{image: "nginx@" + digest, yes: "nginx:* nginx@sha256:* docker.io/library/nginx@*", no: "nginx nginx:latest nginx:?*"},
		{image: "nginx:1.25@" + digest, yes: "nginx:1.* nginx@sha256:* docker.io/library/nginx:1.25", no: "nginx nginx:latest"},
		{image: "grafana/grafana", yes: "grafana/* grafana/grafana:latest docker.io/grafana/grafana:latest", no: "docker.io/library/*"},
		{image: "registry.example.com:5000/ours/web", yes: "registry.example.com:5000/ours/* *:latest registry.example.com:5000/ours/web:*", no: "docker.io/* ours/*"},
		{image: "localhost/web", yes: "localhost/web:latest", no: "docker.io/*"},
		// By id: the engine gives the names.
		{image: id, names: []string{"nginx:1.25", "nginx@" + digest}, yes: id + " 4bb* nginx:1.* nginx:* docker.io/library/nginx:1.25 nginx@*", no: "docker.io/library/" + id + ":latest *:latest"},
		{image: digest, names: []string{"nginx:1.25"}, yes: "sha256:* nginx:1.25", no: "docker.io/library/sha256:* *:latest"},
		{image: digest, yes: "sha256:* *", no: "docker.io/*"},
		{image: "Not A\x00Reference", yes: "Not* *", no: "docker.io/*"},
		{image: "", no: "* docker.io/*"},
	} {
		of := container.Container{ID: 1, Name: "x", Image: c.image, ImageNames: c.names}
		for want, list := range map[bool]string{true: c.yes, false: c.no} {
			for _, pattern := range strings.Fields(list) {
				p, problems := ParseFile("f.yaml", []byte("match: {image: '"+pattern+"'}\nset: {netcpu: isolate}\n"))
				if len(problems) > 0 {
					t.Fatal(problems)
				}
				targets, _ := p.Resolve([]container.Container{of})
				if got := targets[0].Settings.NetCPU == NetCPUIsolate; got != want {
					t.Errorf("image %q (%q): pattern %q matches: %v, want %v", c.image, c.names, pattern, got, want)
				}
			}
		}
	}
}

func FuzzImageNames(f *testing.F) {
	for _, s := range []string{"nginx", "nginx:1", "sha256:00", "a@sha256:" + strings.Repeat("0", 64), "\xff", "x/y:z/", ""} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, image, name string) {
		names := imageNames(container.Container{Image: image, ImageNames: []string{name}})
		if (image == "") != (len(names) == 0) || len(names) > 20 || image != "" && names[0] != image {
			t.Fatalf("%q, %q: %q", image, name, names)
		}
	})
}

// TestDocs: the reference has a row for each key, with its default, and its examples
// are valid.
func TestDocs(t *testing.T) {
	data, err := os.ReadFile("../docs/policy.md")
	testkit.Must(t, err)
	text := string(data)
	if n := testing.AllocsPerRun(100, func() { Schema() }); n != 0 { // for each key of each container, at each look
		t.Errorf("the list is copied (%v allocations)", n)
	}
	for _, k := range Schema() {
		if _, err := k.parseValue(k.Example); err != nil || k.Form == "" || k.Meaning == "" {
			t.Errorf("key %+v: its example: %v", k, err)
		}
		if strings.HasPrefix(k.Name, "net.ingress.") {
			continue // one row for them all
		}
		row := "\n| `" + k.Name + "` |"
		_, after, found := strings.Cut(text, row)
		line, _, _ := strings.Cut(after, "\n")
		cells := strings.Split(line, " | ")
		if !found || len(cells) != 3 || k.Default != "" && strings.Trim(cells[1], "`") != k.Default {
			t.Errorf("docs/policy.md: no row %q with the default %q", row[1:], k.Default)
		}
		if (k.Host != "") != strings.Contains(line, "`labels: host`") {
			t.Errorf("docs/policy.md: %s: labels count where a file says so (%q); its row is %s", k.Name, k.Host, line)
		}
	}
	examples := 0
	for part := range strings.SplitSeq(text, "```yaml\n") {
		example, _, closed := strings.Cut(part, "\n```")
		if !closed || !slices.ContainsFunc([]string{"match:", "policies:"}, func(s string) bool { return strings.Contains(example, s) }) {
			continue
		}
		examples++
		for _, p := range Check("example", []byte(example+"\n")) {
			t.Errorf("docs/policy.md: %v in\n%s", p, example)
		}
	}
	testkit.Same(t, "examples of files in docs/policy.md", 5, examples)
}
