package policy

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestWith(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	soon, later := now.Add(time.Second), now.Add(time.Minute)
	base := Target{
		Container: container.Container{ID: 7},
		Settings:  Settings{NetCPU: NetCPUAuto, Egress: Net{Rate: 1e6, Ceil: 2e6}},
		Origins: []Origin{{Key: "fairlead.net.ceil", Value: "2mbit", From: "label"}, {Key: "fairlead.net.rate", Value: "1mbit", From: "label"},
			{Key: "fairlead.netcpu", Value: "auto", From: "label"}},
	}
	before := base
	before.Origins = append([]Origin(nil), base.Origins...)
	isolate := Decision{Container: 7, Key: "fairlead.netcpu", Value: "isolate", Expiry: later}
	of := func(instead string) Decision {
		d := isolate
		d.Instead, d.Reason, d.Since = instead, "a flood", now
		return d
	}
	for _, c := range []struct {
		name   string
		ds     []Decision
		netcpu NetCPU
		expiry time.Time
		from   string // of netcpu
		err    string
	}{
		{"none", nil, NetCPUAuto, time.Time{}, "label", ""},
		{"one", []Decision{isolate}, NetCPUIsolate, later, "controller", ""},
		{"the first expiry", []Decision{isolate, decided(7, "fairlead.io.weight", "200", soon)}, NetCPUIsolate, soon, "controller", ""},
		{"another container's", []Decision{decided(8, "fairlead.netcpu", "isolate", later)}, NetCPUAuto, time.Time{}, "label", ""},
		{"lapsed", []Decision{decided(7, "fairlead.netcpu", "isolate", now)}, NetCPUAuto, time.Time{}, "label", ""},
		{"never lapses", []Decision{decided(7, "fairlead.netcpu", "isolate", time.Time{})}, NetCPUAuto, time.Time{}, "label", ""},
		{"unknown key", []Decision{decided(7, "netcpu", "isolate", later)}, NetCPUAuto, time.Time{}, "label", `decision netcpu = "isolate": unknown key`},
		{"bad value", []Decision{decided(7, "fairlead.netcpu", "x", later), isolate}, NetCPUIsolate, later, "controller", `decision fairlead.netcpu = "x": must be one of observe, charge, isolate, auto`},
		{"what policy says", []Decision{of("auto")}, NetCPUIsolate, later, "controller", ""},
		{"one of several that policy may say", []Decision{of("auto|isolate")}, NetCPUIsolate, later, "controller", ""},
		{"what policy says no longer", []Decision{of("charge")}, NetCPUAuto, time.Time{}, "label", ""},
		{"contradiction", []Decision{decided(7, "fairlead.net.rate", "3mbit", soon), isolate}, NetCPUIsolate, later, "controller",
			`decision fairlead.net.rate = "3mbit": net.rate 3mbit is more than net.ceil 2mbit`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := base.With(c.ds, now)
			if (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if got.Settings.NetCPU != c.netcpu || !got.Expiry.Equal(c.expiry) || got.Settings.Egress != base.Settings.Egress {
				t.Errorf("%+v", got)
			}
			for _, o := range got.Origins {
				if o.Key == "fairlead.netcpu" && o.From != c.from {
					t.Errorf("netcpu is from %s", o.From)
				}
			}
			testkit.Same(t, "the Target itself was changed", before, base)
		})
	}
	// explain shows the decision, its reason, and the value that it replaces.
	base.Origins = []Origin{{Key: "fairlead.netcpu", Value: "auto", From: "/p/1.yaml", Line: 2}}
	got, err := base.With([]Decision{of("auto")}, now)
	testkit.Check(t, err)
	want := []Origin{{Key: "fairlead.netcpu", Value: "isolate", From: "controller", Instead: "fairlead.netcpu=auto (/p/1.yaml:2)", Reason: "a flood", Since: now}}
	testkit.Same(t, "origins", want, got.Origins)
}

func decided(id container.ID, key, value string, expiry time.Time) Decision {
	return Decision{Container: id, Key: key, Value: value, Expiry: expiry}
}

// A mode is in force while a controller says so, or always if a container may take nothing.
func TestInForce(t *testing.T) {
	nothing, some := 0.0, 0.03
	decided := map[string]time.Time{"fairlead.netcpu": time.Unix(1, 0)}
	for _, x := range []struct {
		of   Target
		want NetCPU
	}{
		{Target{}, ""},
		{Target{Settings: Settings{NetCPU: NetCPUObserve, NetCPUSteal: &nothing}}, NetCPUObserve},
		{Target{Settings: Settings{NetCPU: NetCPUIsolate}}, NetCPUAuto},
		{Target{Settings: Settings{NetCPU: NetCPUIsolate, NetCPUSteal: &some}}, NetCPUAuto},
		{Target{Settings: Settings{NetCPU: NetCPUCharge}}, NetCPUCharge},
		{Target{Settings: Settings{NetCPU: NetCPUIsolate, NetCPUSteal: &nothing}}, NetCPUIsolate},
		{Target{Settings: Settings{NetCPU: NetCPUIsolate}, Decided: decided}, NetCPUIsolate},
		{Target{Settings: Settings{NetCPU: NetCPUIsolate}, Decided: map[string]time.Time{"fairlead.io.yield": time.Unix(1, 0)}}, NetCPUAuto},
	} {
		testkit.Same(t, fmt.Sprintf("%+v", x.of), x.want, x.of.InForce())
	}
}

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
		testkit.Same(t, when, want, originText(targets[0].Origins))
		testkit.Same(t, when+": settings of the other one", 2, len(targets[1].Origins))
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
	testkit.Same(t, "invalid overrides", want, fmt.Sprint(err))
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
	testkit.Same(t, "a broken label brings back what was taken back", "fairlead.net.ceil=60mbit (set by me)", resolve())
	// A contradiction that comes later: the values that were in force together stay.
	c.Labels = map[string]string{"fairlead.net.rate": "40mbit"}
	resolve()
	c.Labels = map[string]string{"fairlead.net.rate": "70mbit"}
	testkit.Same(t, "contradiction", "fairlead.net.ceil=60mbit (set by me)\nfairlead.net.rate=40mbit (label)", resolve())
	testkit.Must(t, s.Override(nil))
	testkit.Same(t, "nothing is set by hand any more", "fairlead.net.rate=70mbit (label)", resolve())
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
		testkit.Same(t, fmt.Sprint(tt.set), tt.want, got)
	}
}
