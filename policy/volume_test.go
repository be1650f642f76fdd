package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

func TestVolume(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  Volume
		fault string // part of the error
	}{
		{value: "500gb/month", want: Volume{Bytes: 500e9, Per: Monthly}},
		{value: "1.5TiB/Month Received", want: Volume{Bytes: 3 << 39, Per: Monthly, Of: OnlyReceived}},
		{value: "20gb/day \t sent", want: Volume{Bytes: 20e9, Per: Daily, Of: OnlySent}},
		{value: "500gb", fault: "must end in /day or /month"},
		{value: "500gb/year", fault: "must end in /day or /month"},
		{value: "500/month", fault: "needs a unit"},
		{value: "500gbit/month", fault: "unknown unit"},
		{value: "500 gb/month", fault: "must end in"},
		{value: "1gb/day out", fault: "is no direction"},
		{value: "1gb/day sent received", fault: "must be like"},
		{value: " ", fault: "must be like"},
		{value: "1b/day", fault: "between 1mb and 1000pb"},
		{value: "1001pb/day", fault: "between 1mb and 1000pb"},
	} {
		k, _ := lookup("net.volume")
		set, err := k.parseValue(tt.value)
		if err != nil || tt.fault != "" {
			if err == nil || tt.fault == "" || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("%q: %v, want an error with %q", tt.value, err, tt.fault)
			}
			continue
		}
		var s Settings
		if set(&s); s.Volume != tt.want {
			t.Errorf("%q: %+v, want %+v", tt.value, s.Volume, tt.want)
		}
	}
	if got := Understood("fairlead.net.volume", "500gb/month sent"); got != "500.0 GB/month sent" {
		t.Errorf("understood as %q", got)
	}
}

// What comes after a volume needs one.
func TestVolumeAfter(t *testing.T) {
	for _, tt := range []struct {
		labels map[string]string
		want   Volume
	}{
		{map[string]string{"fairlead.net.volume": "5gb/day", "fairlead.net.volume.after": "1mbit"}, Volume{Bytes: 5e9, Per: Daily, After: 1e6}},
		{map[string]string{"fairlead.net.volume": "5gb/day", "fairlead.net.volume.after": "None"}, Volume{Bytes: 5e9, Per: Daily}},
		{map[string]string{"fairlead.net.volume.after": "1mbit"}, Volume{}},
	} {
		ts, ps := new(Policy).Resolve([]container.Container{{ID: 1, Labels: tt.labels}})
		if len(ps) > 0 || ts[0].Settings.Volume != tt.want {
			t.Errorf("%v: %+v %v, want %+v", tt.labels, ts[0].Settings.Volume, ps, tt.want)
		}
	}
}

// Two decisions that only hold together both count, whatever their order.
func TestDecisionsTogether(t *testing.T) {
	now := time.Unix(1000, 0)
	target := Target{Container: container.Container{ID: 7}, Settings: Settings{Egress: Net{Rate: 50e6, Ceil: 200e6}}}
	decide := func(key, value string) Decision {
		return Decision{Container: 7, Key: "fairlead." + key, Value: value, Expiry: now.Add(time.Second)}
	}
	for _, ds := range [][]Decision{
		{decide("net.ceil", "1mbit"), decide("net.rate", "1mbit")},
		{decide("net.rate", "1mbit"), decide("net.ceil", "1mbit")},
	} {
		got, err := target.With(ds, now)
		if err != nil || got.Settings.Egress.Rate != 1e6 || got.Settings.Egress.Ceil != 1e6 || len(got.Origins) != 2 {
			t.Errorf("%+v: %v", got, err)
		}
	}
	got, err := target.With([]Decision{decide("net.ceil", "1mbit"), decide("net.weight", "2")}, now)
	if err == nil || got.Settings.Egress.Ceil != 200e6 || got.Settings.Egress.Weight != 2 {
		t.Errorf("a contradiction takes the others along: %+v: %v", got.Settings.Egress, err)
	}
}

func FuzzVolume(f *testing.F) {
	for _, v := range []string{"500gb/month", "20gib/day sent", "1.5tb/day received", "/", "gb/month", "1e9b/day", "9999999999pb/month"} {
		f.Add(v)
	}
	k, _ := lookup("net.volume")
	f.Fuzz(func(t *testing.T, v string) {
		set, err := k.parseValue(v)
		if err != nil {
			return
		}
		var s, again Settings
		set(&s)
		set, err = k.parseValue(s.Volume.String())
		if err != nil {
			t.Fatalf("%q is formatted as %q: %v", v, s.Volume, err)
		}
		if set(&again); again.Volume != s.Volume {
			t.Errorf("%q: %+v, read back %+v", v, s.Volume, again.Volume)
		}
	})
}
