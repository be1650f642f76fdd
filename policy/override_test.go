package policy

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestOverride(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "10.yaml")
	write(t, file, "labels: deny\nmatch: {name: \"*\"}\nset: {netcpu: observe, net.ceil: 200mbit}\n")
	s := NewStore(dir, time.Now)
	testkit.Must(t, s.Reload())
	c := container.Container{ID: 1, Name: "web", Labels: map[string]string{"fairlead.net.weight": "3"}}
	other := container.Container{ID: 2, Name: "other"}
	const from = "set by uid 0 at 2026-11-22T08:00:00Z"
	by := func(key, value string) Override { return Override{Container: 1, Key: key, Value: value, From: from} }
	says := func(when, want string) {
		t.Helper()
		targets, _ := s.Resolve([]container.Container{c, other})
		if got := originText(targets[0].Origins); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", when, got, want)
		}
		if got := len(targets[1].Origins); got != 2 {
			t.Errorf("%s: the other one has %d settings", when, got)
		}
	}
	files := "fairlead.net.ceil=200mbit (" + file + ":3)\n"
	says("before", files+"fairlead.netcpu=observe ("+file+":3)")
	testkit.Must(t, s.Override([]Override{by("netcpu", "isolate"), by("net.rate", "50mbit"), by("net.weight", "2")}))
	hand := "fairlead.net.rate=50mbit (" + from + ")\nfairlead.net.weight=2 (" + from + ")\nfairlead.netcpu=isolate (" + from + ")"
	says("above files, though labels are denied", files+hand)

	// An invalid value is reported, and the rest counts.
	err := s.Override([]Override{by("netcpu", "isolat"), by("net.ciel", "1mbit"), by("net.weight", "2")})
	want := `container "" (1): netcpu: "isolat": must be one of observe, charge, isolate, auto` + "\n" +
		`container "" (1): net.ciel: "1mbit": unknown key; did you mean net.ceil?`
	if err == nil || err.Error() != want {
		t.Errorf("invalid overrides: %v\nwant %s", err, want)
	}
	says("those that are valid", files+"fairlead.net.weight=2 ("+from+")\nfairlead.netcpu=observe ("+file+":3)")
}

// What was taken back stands in for nothing: neither for a label that breaks, nor where sources
// contradict each other.
func TestOverrideTakenBack(t *testing.T) {
	s := NewStore(t.TempDir(), time.Now)
	testkit.Must(t, s.Reload())
	c := container.Container{ID: 1, Labels: map[string]string{}}
	resolve := func() string {
		targets, _ := s.Resolve([]container.Container{c})
		return originText(targets[0].Origins)
	}
	testkit.Must(t, s.Override([]Override{{1, "net.rate", "50mbit", "set by me"}, {1, "net.ceil", "60mbit", "set by me"}}))
	if got := resolve(); got != "fairlead.net.ceil=60mbit (set by me)\nfairlead.net.rate=50mbit (set by me)" {
		t.Fatal(got)
	}
	testkit.Must(t, s.Override([]Override{{1, "net.ceil", "60mbit", "set by me"}}))
	c.Labels = map[string]string{"fairlead.net.rate": "50mbyte"}
	if got := resolve(); got != "fairlead.net.ceil=60mbit (set by me)" {
		t.Errorf("a broken label brings back what was taken back: %s", got)
	}
	// A contradiction that comes later: the values that were in force together stay.
	c.Labels = map[string]string{"fairlead.net.rate": "40mbit"}
	resolve()
	c.Labels = map[string]string{"fairlead.net.rate": "70mbit"}
	if got := resolve(); got != "fairlead.net.ceil=60mbit (set by me)\nfairlead.net.rate=40mbit (label)" {
		t.Errorf("contradiction: %s", got)
	}
	testkit.Must(t, s.Override(nil))
	if got := resolve(); got != "fairlead.net.rate=70mbit (label)" {
		t.Errorf("nothing is set by hand any more: %s", got)
	}
}

func TestCheckOverrides(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "10.yaml")
	write(t, file, all("net.ceil: 200mbit"))
	s := NewStore(dir, time.Now)
	testkit.Must(t, s.Reload())
	c := container.Container{ID: 1, Name: "web", Labels: map[string]string{"fairlead.netcpu": "broken"}}
	for _, tt := range []struct {
		set  []Override
		want string // "": it may be
	}{
		{nil, ""},
		{[]Override{{1, "net.rate", "50mbit", "x"}, {1, "netcpu", "isolate", "x"}}, ""},
		{[]Override{{1, "net.rate", "300mbit", "x"}, {1, "net.ceil", "1gbit", "x"}}, ""},
		{[]Override{{1, "net.rate", "300mbit", "x"}}, `net.rate: "300mbit": net.rate 300mbit is more than net.ceil 200mbit (net.rate from x, net.ceil from ` + file + ":2)"},
		{[]Override{{1, "net.rate", "300mbit", "x"}, {1, "net.ceil", "1mbit", "x"}}, `net.rate: "300mbit": net.rate 300mbit is more than net.ceil 1mbit (net.rate from x, net.ceil from x)`},
		{[]Override{{1, "net.weight", "0", "x"}, {1, "net.rate", "1mbyte", "x"}}, `net.rate: "1mbyte": unknown unit "mbyte": write 8mbit` +
			"\n" + `net.weight: "0": must be between 1 and 10000`},
		{[]Override{{1, "overlay", "on", "x"}}, ""},
		{[]Override{{1, "overlay", "off", "x"}}, ""},
	} {
		got := ""
		if err := s.Check(c, tt.set); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%v:\n%s\nwant\n%s", tt.set, got, tt.want)
		}
	}
}
