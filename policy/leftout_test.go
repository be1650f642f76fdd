package policy

import (
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
)

// TestLeftOut has labels that were too long, or too many, to be read.
func TestLeftOut(t *testing.T) {
	p, err := ParseFile("10.yaml", []byte("match: {labels: {tier: \"*\"}}\nset: {net.rate: 9mbit}\n"))
	if err != nil {
		t.Fatal(err)
	}
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
			if got := strings.Join(lines, "\n"); got != c.says {
				t.Errorf("problems:\n%s\nwant:\n%s", got, c.says)
			}
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
