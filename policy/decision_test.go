package policy

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
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
			if diff := cmp.Diff(before, base); diff != "" {
				t.Errorf("the Target itself was changed:\n%s", diff)
			}
		})
	}
}

func decided(id container.ID, key, value string, expiry time.Time) Decision {
	return Decision{Container: id, Key: key, Value: value, Expiry: expiry}
}

// explain shows what is decided, why, and in place of what.
func TestWithSays(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	base := Target{Container: container.Container{ID: 7}, Origins: []Origin{{Key: "fairlead.netcpu", Value: "auto", From: "/p/1.yaml", Line: 2}}}
	got, err := base.With([]Decision{{Container: 7, Key: "fairlead.netcpu", Value: "isolate", Expiry: now.Add(1), Instead: "auto", Reason: "a flood", Since: now}}, now)
	want := []Origin{{Key: "fairlead.netcpu", Value: "isolate", From: "controller", Instead: "fairlead.netcpu=auto (/p/1.yaml:2)", Reason: "a flood", Since: now}}
	if diff := cmp.Diff(want, got.Origins); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
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
		if got := x.of.InForce(); got != x.want {
			t.Errorf("%+v: %q, want %q", x.of, got, x.want)
		}
	}
}
