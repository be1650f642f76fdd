package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// What a label was once allowed to ask for does not stand in for it after that, and what
// is set by hand needs no label.
func TestStoreHostLabels(t *testing.T) {
	s := NewStore("", nil)
	const host = "labels: host\nmatch: {name: x}\n"
	hand := Override{Container: 1, Key: "io.realtime", Value: "30ms", From: "hand"}
	for i, step := range []struct {
		label    string
		files    []string
		hand     []Override
		want     string
		problems int
	}{
		{"20ms", []string{host}, nil, "fairlead.io.realtime=20ms (label)", 0},
		{"fast", []string{host}, nil, "fairlead.io.realtime=20ms (label)", 1}, // the last good one
		{"20ms", []string{host}, nil, "fairlead.io.realtime=20ms (label)", 0},
		{"fast", nil, nil, "", 1},
		{"20ms", nil, nil, "", 1},
		{"20ms", nil, []Override{hand}, "fairlead.io.realtime=30ms (hand)", 0},
	} {
		testkit.Must(t, s.Override(step.hand))
		s.use(join(t, step.files...), nil, time.Time{}, time.Time{})
		targets, problems := s.Resolve([]container.Container{{ID: 1, Name: "x", Labels: map[string]string{"fairlead.io.realtime": step.label}}})
		if got := originText(targets[0].Origins); got != step.want || len(problems) != step.problems {
			t.Errorf("step %d: %q, %v, want %q, %d", i, got, problems, step.want, step.problems)
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
	if c.Labels["tier"] != "" {
		t.Error("what the Set has published was changed")
	}
}
