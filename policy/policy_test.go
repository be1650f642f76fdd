package policy

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// join makes one Policy of files as LoadDir does.
func join(t *testing.T, texts ...string) *Policy {
	t.Helper()
	var files []file
	for i, text := range texts {
		files = append(files, file{fmt.Sprintf("p/%d.yaml", i+1), []byte(text), noWriter})
	}
	p, err := load(files, nil)
	testkit.Must(t, err)
	return p
}

func all(settings string) string { return "match: {name: \"*\"}\nset: {" + settings + "}\n" }

func originText(os []Origin) string {
	var lines []string
	for _, o := range os {
		lines = append(lines, o.String())
	}
	return strings.Join(lines, "\n")
}

// A name from the cgroup tree is any user's choice.
func TestResolveRuntime(t *testing.T) {
	for _, c := range []struct {
		match string
		want  []string // the sources of the matching rules
	}{
		{`{name: web}`, []string{"docker", "podman", "containerd", "cri-o", "sandbox"}},
		{`{name: web, runtime: docker}`, []string{"docker"}},
		{`{runtime: [podman, cgroup]}`, []string{"podman", "cgroup"}},
		{`{name: web, runtime: cgroup}`, []string{"cgroup"}},
		{`{name: web, runtime: "*"}`, []string{"docker", "podman", "containerd", "cri-o", "sandbox", "cgroup"}},
		{`{name: db, runtime: cgroup}`, nil},
	} {
		p, problems := ParseFile("f.yaml", []byte("match: "+c.match+"\nset: {netcpu: auto}\n"))
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		var got []string
		for _, source := range []string{"docker", "podman", "containerd", "cri-o", "sandbox", container.CgroupSource} {
			targets, _ := p.Resolve([]container.Container{{ID: 7, Name: "web", Source: source}})
			if targets[0].Settings.NetCPU == NetCPUAuto {
				got = append(got, source)
			}
		}
		testkit.Same(t, c.match, c.want, got)
	}
}

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		name     string
		files    []string
		labels   map[string]string
		image    map[string]string
		origins  string
		problems string
		refused  int
	}{
		{name: "no policy"},
		{
			name:    "the later file wins per key",
			files:   []string{all("net.rate: 1mbit, netcpu: auto"), all("net.rate: 2mbit")},
			origins: "fairlead.net.rate=2mbit (p/2.yaml:2)\nfairlead.netcpu=auto (p/1.yaml:2)",
		},
		{
			name:    "the later policy of a file wins",
			files:   []string{all("netcpu: auto") + "---\n" + all("netcpu: isolate")},
			origins: "fairlead.netcpu=isolate (p/1.yaml:5)",
		},
		{
			name:    "a label wins over files",
			files:   []string{all("netcpu: auto, net.weight: 2")},
			labels:  map[string]string{"fairlead.netcpu": "isolate"},
			origins: "fairlead.net.weight=2 (p/1.yaml:2)\nfairlead.netcpu=isolate (label)",
		},
		{
			name:     "a matching file denies labels, whatever its place",
			files:    []string{"labels: deny\nmatch: {name: web}\n", "labels: allow\n---\n" + all("netcpu: auto")},
			labels:   map[string]string{"fairlead.netcpu": "isolate", "kubernetes.io/egress-bandwidth": "1M", "other": "x"},
			origins:  "fairlead.netcpu=auto (p/2.yaml:4)",
			problems: "container \"web\" (7): fairlead.netcpu: \"isolate\": is ignored: p/1.yaml:1 says labels: deny\ncontainer \"web\" (7): kubernetes.io/egress-bandwidth: \"1M\": is ignored: p/1.yaml:1 says labels: deny",
		},
		{
			name:    "a file that does not match denies nothing",
			files:   []string{"labels: deny\nmatch: {name: db}\n"},
			labels:  map[string]string{"fairlead.netcpu": "isolate"},
			origins: "fairlead.netcpu=isolate (label)",
		},
		{
			name:     "an image's labels are a stranger's",
			files:    []string{"match: {labels: {tier: gold}}\nset: {net.rate: 1mbit}\n"},
			labels:   map[string]string{"fairlead.netcpu": "auto"},
			image:    map[string]string{"fairlead.net.rate": "900mbit", "kubernetes.io/egress-bandwidth": "1M", "tier": "gold", "other": "x"},
			origins:  "fairlead.netcpu=auto (label)",
			problems: "container \"web\" (7): fairlead.net.rate: \"900mbit\": is ignored: " + ofImage + "\ncontainer \"web\" (7): kubernetes.io/egress-bandwidth: \"1M\": is ignored: " + ofImage + "\ncontainer \"web\" (7): tier: \"gold\": no policy file can match it: it counts as its image's, which has the same label and value or was removed; if it is yours, run the agent with --image-labels",
		},
		{
			name:    "a file lets an image's labels count, below the container's",
			files:   []string{"labels: image\nmatch: {name: web}\n", all("net.rate: 1mbit, net.weight: 2")},
			labels:  map[string]string{"fairlead.netcpu": "auto"},
			image:   map[string]string{"fairlead.netcpu": "isolate", "fairlead.net.rate": "2mbit"},
			origins: "fairlead.net.rate=2mbit (image label)\nfairlead.net.weight=2 (p/2.yaml:2)\nfairlead.netcpu=auto (label)",
		},
		{
			name:     "a file that does not match lets nothing count",
			files:    []string{"labels: image\nmatch: {name: db}\n"},
			image:    map[string]string{"fairlead.netcpu": "isolate"},
			problems: "container \"web\" (7): fairlead.netcpu: \"isolate\": is ignored: " + ofImage,
		},
		{
			name:     "a file that denies labels denies those of the image",
			files:    []string{"labels: image\nmatch: {name: web}\n", "labels: deny\nmatch: {name: web}\n"},
			image:    map[string]string{"fairlead.netcpu": "isolate"},
			problems: "container \"web\" (7): fairlead.netcpu: \"isolate\": is ignored: p/2.yaml:1 says labels: deny",
		},
		{
			name:     "a label has no say on what acts on others",
			files:    []string{all("io.realtime: 20ms")},
			labels:   map[string]string{"fairlead.io.realtime": "500ms", "fairlead.io.interrupts": "apart", "fairlead.net.latency.split": "on", "fairlead.io.yield": "auto"},
			origins:  "fairlead.io.realtime=20ms (p/1.yaml:2)\nfairlead.io.yield=auto (label)",
			problems: "container \"web\" (7): fairlead.io.interrupts: \"apart\": is ignored: " + onOthers + ofHost + "\ncontainer \"web\" (7): fairlead.io.realtime: \"500ms\": is ignored: " + onOthers + ofHost + "\ncontainer \"web\" (7): fairlead.net.latency.split: \"on\": is ignored: " + onOthers + ofHost,
			refused:  3,
		},
		{
			name:    "a file gives it one",
			files:   []string{"labels: host\nmatch: {name: web}\n", all("io.realtime: 20ms")},
			labels:  map[string]string{"fairlead.io.realtime": "500ms"},
			origins: "fairlead.io.realtime=500ms (label)",
		},
		{
			name:     "a file that does not match gives none",
			files:    []string{"labels: host\nmatch: {name: db}\n"},
			labels:   map[string]string{"fairlead.overlay": "on"},
			problems: "container \"web\" (7): fairlead.overlay: \"on\": is ignored: " + pastHost + ofHost,
			refused:  1,
		},
		{
			name:     "nor one that denies labels",
			files:    []string{"labels: host\nmatch: {name: web}\n", "labels: deny\nmatch: {name: web}\n"},
			labels:   map[string]string{"fairlead.io.realtime": "500ms"},
			problems: "container \"web\" (7): fairlead.io.realtime: \"500ms\": is ignored: p/2.yaml:1 says labels: deny",
		},
		{
			name:     "an image's labels that count have as little",
			files:    []string{"labels: image\nmatch: {name: web}\n"},
			image:    map[string]string{"fairlead.io.realtime": "500ms", "fairlead.netcpu": "auto"},
			origins:  "fairlead.netcpu=auto (image label)",
			problems: "container \"web\" (7): fairlead.io.realtime: \"500ms\": is ignored: " + onOthers + ofHost,
			refused:  1,
		},
		{
			name:    "both files let them count",
			files:   []string{"labels: image\nmatch: {name: web}\n", "labels: host\nmatch: {name: web}\n"},
			image:   map[string]string{"fairlead.io.realtime": "500ms"},
			origins: "fairlead.io.realtime=500ms (image label)",
		},
		{
			name:     "a broken label leaves the file's value and the other labels",
			files:    []string{all("netcpu: auto")},
			labels:   map[string]string{"fairlead.netcpu": "max", "fairlead.net.weight": "3"},
			origins:  "fairlead.net.weight=3 (label)\nfairlead.netcpu=auto (p/1.yaml:2)",
			problems: `container "web" (7): fairlead.netcpu: "max": must be one of observe, charge, isolate, auto`,
		},
		{
			name:     "a label that contradicts a file",
			files:    []string{all("net.ceil: 1mbit, net.weight: 2")},
			labels:   map[string]string{"fairlead.net.rate": "2mbit", "fairlead.net.weight": "3"},
			origins:  "fairlead.net.ceil=1mbit (p/1.yaml:2)\nfairlead.net.weight=3 (label)",
			problems: `container "web" (7): fairlead.net.rate: "2mbit": net.rate 2mbit is more than net.ceil 1mbit (net.rate from label, net.ceil from p/1.yaml:2)`,
		},
		{
			name:     "three files, of which the last two contradict",
			files:    []string{all("net.rate: 1mbit, net.ceil: 9mbit"), all("net.rate: 5mbit"), all("net.ceil: 2mbit")},
			origins:  "fairlead.net.ceil=9mbit (p/1.yaml:2)\nfairlead.net.rate=5mbit (p/2.yaml:2)",
			problems: `container "web" (7): fairlead.net.rate: "5mbit": net.rate 5mbit is more than net.ceil 2mbit (net.rate from p/2.yaml:2, net.ceil from p/3.yaml:2)`,
		},
		{
			name:    "what a later file mends is no contradiction",
			files:   []string{all("net.rate: 5mbit"), all("net.ceil: 2mbit"), all("net.rate: 1mbit")},
			origins: "fairlead.net.ceil=2mbit (p/2.yaml:2)\nfairlead.net.rate=1mbit (p/3.yaml:2)",
		},
		{
			name:     "both directions and the disk at once",
			files:    []string{all("net.ceil: 1mbit, net.ingress.ceil: 1mbit, io.max: /dev/vdb riops=5")},
			labels:   map[string]string{"fairlead.net.rate": "2mbit", "fairlead.net.ingress.rate": "2mbit", "fairlead.io.reserve": "/dev/vdb riops=6"},
			origins:  "fairlead.io.max=/dev/vdb riops=5 (p/1.yaml:2)\nfairlead.net.ceil=1mbit (p/1.yaml:2)\nfairlead.net.ingress.ceil=1mbit (p/1.yaml:2)",
			problems: "container \"web\" (7): fairlead.net.rate: \"2mbit\": net.rate 2mbit is more than net.ceil 1mbit (net.rate from label, net.ceil from p/1.yaml:2)\ncontainer \"web\" (7): fairlead.net.ingress.rate: \"2mbit\": net.ingress.rate 2mbit is more than net.ingress.ceil 1mbit (net.ingress.rate from label, net.ingress.ceil from p/1.yaml:2)\ncontainer \"web\" (7): fairlead.io.reserve: \"/dev/vdb riops=6\": io.reserve /dev/vdb riops=6 is more than io.max riops=5 (io.reserve from label, io.max from p/1.yaml:2)",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := join(t, c.files...)
			targets, problems := p.Resolve([]container.Container{{ID: 7, Name: "web", Labels: c.labels, ImageLabels: c.image}})
			if len(targets) != 1 {
				t.Fatalf("%d targets", len(targets))
			}
			testkit.Same(t, "origins", c.origins, originText(targets[0].Origins))
			testkit.Same(t, "problems", c.problems, Problems(problems).Error())
			if got := targets[0].Refused; len(got) != c.refused || c.refused > 0 && got[0].Container != 7 {
				t.Errorf("refused %v, want %d", got, c.refused)
			}
		})
	}
}

func TestResolveHostileName(t *testing.T) {
	_, problems := (&Policy{}).Resolve([]container.Container{{ID: 1, Name: "x\x1b[2J\n" + strings.Repeat("y", 99), Labels: map[string]string{"fairlead.x": "y"}}})
	want := `container "x\x1b[2J\nyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"... (105 bytes) (1): fairlead.x: "y": unknown key`
	if got := Problems(problems).Error(); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestResolveDoesNotShare(t *testing.T) {
	p := join(t, all("net.priority: 1, overlay: on, io.reserve: /dev/vdb riops=1"))
	a, _ := p.Resolve([]container.Container{{ID: 1}, {ID: 2}})
	*a[0].Settings.Egress.Priority = 99
	*a[0].Settings.Overlay = false
	a[0].Settings.IO[0].Reserved.ReadIOPS = 99
	b, _ := p.Resolve([]container.Container{{ID: 1}})
	if diff := cmp.Diff(a[1].Settings, b[0].Settings); diff != "" || b[0].Settings.IO[0].Reserved.ReadIOPS != 1 {
		t.Errorf("a change of one Target shows in another: %s", diff)
	}
}

// drawPolicy makes a random valid policy that has contradictions between files.
func drawPolicy(t *rapid.T) *Policy {
	var files []file
	for i := range rapid.IntRange(0, 4).Draw(t, "files") {
		var b strings.Builder
		fmt.Fprintf(&b, "labels: %s\npolicies:\n", rapid.SampledFrom([]string{"allow", "allow", "deny", "host"}).Draw(t, "labels"))
		for range rapid.IntRange(1, 3).Draw(t, "policies") {
			rate := rapid.IntRange(1, 9).Draw(t, "rate")
			fmt.Fprintf(&b, "- match: {name: \"%s\"}\n  set: {net.weight: %d", rapid.SampledFrom([]string{"*", "a*", "b?"}).Draw(t, "name"), rate)
			switch rapid.IntRange(0, 3).Draw(t, "keys") {
			case 0:
				fmt.Fprintf(&b, ", net.rate: %dmbit", rate)
			case 1:
				fmt.Fprintf(&b, ", net.ceil: %dmbit", rate)
			case 2:
				fmt.Fprintf(&b, ", net: {rate: %dmbit, ceil: %dmbit}", rate, rate+2)
			}
			b.WriteString("}\n")
		}
		files = append(files, file{fmt.Sprintf("%d.yaml", i), []byte(b.String()), noWriter})
	}
	p, err := load(files, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func drawContainers(t *rapid.T) []container.Container {
	var cs []container.Container
	for i := range rapid.IntRange(0, 6).Draw(t, "containers") {
		c := container.Container{ID: container.ID(i*3 + 1), Name: rapid.SampledFrom([]string{"a1", "b2", "c", ""}).Draw(t, "name"), Labels: map[string]string{}}
		for _, k := range []string{"fairlead.net.rate", "fairlead.net.ceil", "fairlead.net.latency.split", "kubernetes.io/egress-bandwidth", "fairlead.bad"} {
			if v := rapid.SampledFrom([]string{"", "1mbit", "5mbit", "8mbit", "4M", "on", "x"}).Draw(t, k); v != "" {
				c.Labels[k] = v
			}
		}
		cs = append(cs, c)
	}
	return cs
}

func TestResolveProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, cs := drawPolicy(t), drawContainers(t)
		targets, problems := p.Resolve(cs)
		shuffled := slices.Clone(cs)
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		before := slices.Clone(shuffled)
		targets2, problems2 := p.Resolve(shuffled)
		if diff := cmp.Diff(targets, targets2) + cmp.Diff(problems, problems2); diff != "" {
			t.Fatalf("order matters: %s", diff)
		}
		if diff := cmp.Diff(before, shuffled); diff != "" {
			t.Fatalf("the argument was changed: %s", diff)
		}
		if len(targets) != len(cs) {
			t.Fatalf("%d targets for %d containers", len(targets), len(cs))
		}
		for i, target := range targets {
			if i > 0 && targets[i-1].Container.ID >= target.Container.ID {
				t.Fatal("targets are not sorted")
			}
			if len(conflicts(target.Settings)) > 0 {
				t.Fatalf("contradictory: %+v", target.Settings)
			}
			if !slices.IsSortedFunc(target.Origins, func(a, b Origin) int { return strings.Compare(a.Key, b.Key) }) {
				t.Fatalf("origins are not sorted: %v", target.Origins)
			}
			// What one container gets does not depend on the others.
			alone, _ := p.Resolve([]container.Container{target.Container})
			if diff := cmp.Diff(target, alone[0]); diff != "" {
				t.Fatalf("neighbours matter: %s", diff)
			}
		}
		// A Store with the same policy and no past agrees, and keeps agreeing as long as nothing
		// changes.
		s := NewStore("", nil)
		s.use(p, nil, time.Time{}, time.Time{})
		for range 2 {
			st, sp := s.Resolve(shuffled)
			if diff := cmp.Diff(targets, st) + cmp.Diff(problems, sp); diff != "" {
				t.Fatalf("the Store disagrees: %s", diff)
			}
		}
	})
}

// TestStoreProperties: over any history of policies and labels, the Store's result is never
// contradictory, and a container without problems gets exactly the present policy.
func TestStoreProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewStore("", nil)
		for range rapid.IntRange(1, 5).Draw(t, "rounds") {
			s.use(drawPolicy(t), nil, time.Time{}, time.Time{})
			cs := drawContainers(t)
			got, _ := s.Resolve(cs)
			want, problems := s.policy.Resolve(cs)
			for i := range got {
				if len(conflicts(got[i].Settings)) > 0 {
					t.Fatalf("contradictory: %+v", got[i].Settings)
				}
				if !slices.ContainsFunc(problems, func(p Problem) bool { return p.Container == got[i].Container.ID }) {
					if diff := cmp.Diff(want[i], got[i]); diff != "" {
						t.Fatalf("no problem, but not what policy says: %s", diff)
					}
				}
			}
		}
	})
}

// What may be done for a latency is allowed with one, and asks for nothing alone.
func TestSplitNeedsLatency(t *testing.T) {
	for set, want := range map[string]Settings{
		"net.latency.split: on":                                      {},
		"net.latency.split: on, net.rate: 1mbit":                     {Egress: Net{Rate: 1e6}},
		"net.latency.split: on, net.latency: 2ms":                    {Egress: Net{Latency: 2 * time.Millisecond, Split: true}},
		"net.latency.split: off, net.latency: 2ms":                   {Egress: Net{Latency: 2 * time.Millisecond}},
		"net.ingress.latency.split: on, net.latency: 2ms":            {Egress: Net{Latency: 2 * time.Millisecond}},
		"net.ingress.latency.split: true, net.ingress.latency: 10us": {Ingress: Net{Latency: 10 * time.Microsecond, Split: true}},
	} {
		targets, problems := join(t, all(set)).Resolve([]container.Container{{ID: 1}})
		if len(problems) > 0 || !reflect.DeepEqual(targets[0].Settings, want) {
			t.Errorf("%s: %+v, %v; want %+v", set, targets[0].Settings, problems, want)
		}
	}
	if ps := Check("f.yaml", []byte("match: {name: x}\nset: {net.latency: 2ms, net.latency.split: maybe}\n")); len(ps) != 1 || ps[0].Reason != "must be on or off" {
		t.Errorf("maybe: %v", ps)
	}
}

func TestExplain(t *testing.T) {
	p := join(t, all("net.rate: 1mbit, net.latency: 2ms, latency: off, overlay: on"))
	targets, _ := p.Resolve([]container.Container{{ID: 1, Labels: map[string]string{"fairlead.netcpu": "isolate"}}})
	want := `fairlead.net.rate=1mbit (p/1.yaml:2)
fairlead.net.ceil=the link (default)
fairlead.net.weight=1 (default)
fairlead.net.latency=2ms (p/1.yaml:2)
fairlead.net.ingress.ceil=the link (default)
fairlead.net.ingress.weight=1 (default)
fairlead.netcpu=isolate (label)
fairlead.latency=off (p/1.yaml:2)
fairlead.overlay=on (p/1.yaml:2)
fairlead.io.weight=100 (default)
fairlead.io.yield=off (default)
fairlead.io.help=auto (default)
fairlead.io.interrupts=off (default)`
	testkit.Same(t, "Effective", want, originText(targets[0].Effective()))
}

// An annotation is called one, and a pod's containers are matched by either name.
func TestPods(t *testing.T) {
	c := container.Container{
		Name: "default/web-0/nginx", Namespace: "default", Pod: "web-0",
		Labels:      map[string]string{"fairlead.netcpu": "isolate", "fairlead.net.ceil": "5mbit"},
		Annotations: map[string]bool{"fairlead.netcpu": true},
	}
	for pattern, matches := range map[string]bool{"nginx": true, "default/web-0/nginx": true, "default/*": true, "web-0": false} {
		testkit.Same(t, pattern, matches, (match{name: patterns{pattern}}).holds(c, nil))
	}
	p := &Policy{}
	target, problems, _ := p.resolve(c, p.matching(c), nil, requests{}, nil)
	from := make(map[string]string)
	for _, o := range target.Origins {
		from[o.Key] = o.From
	}
	if len(problems) != 0 || from["fairlead.netcpu"] != "annotation" || from["fairlead.net.ceil"] != "label" {
		t.Errorf("%v, %v", from, problems)
	}
}
