package policy

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// What is formatted reads as it was, and a decision stands in the place of policy and is
// not added to it.
func TestIOFormats(t *testing.T) {
	ios := []IO{
		{Device: "/dev/vdb", Reserved: Figures{ReadIOPS: 1, WriteBytes: 1 << 20}, Max: Figures{ReadBytes: 4096, WriteIOPS: 9}},
		{Device: "/dev/vdc", Max: Figures{WriteBytes: 2048}},
	}
	reserve, max := FormatReserve(ios), FormatMax(ios)
	testkit.Same(t, "reserve", "/dev/vdb wbps=1048576 riops=1", reserve)
	testkit.Same(t, "max", "/dev/vdb rbps=4096 wiops=9; /dev/vdc wbps=2048", max)
	var s Settings
	for key, value := range map[string]string{"io.reserve": reserve, "io.max": max} {
		k, _ := lookup(key)
		set, err := k.parseValue(value)
		testkit.Must(t, err)
		set(&s)
	}
	if len(s.IO) != 2 || s.IO[0] != ios[0] || s.IO[1] != ios[1] {
		t.Errorf("reads as %+v, want %+v", s.IO, ios)
	}
	now := time.Unix(1000, 0)
	target := Target{Container: container.Container{ID: 1}, Settings: s}
	target, err := target.With([]Decision{{Container: 1, Key: "fairlead.io.max", Value: "/dev/vdb riops=3", Expiry: now.Add(time.Second)}}, now)
	want := IO{Device: "/dev/vdb", Reserved: Figures{ReadIOPS: 1, WriteBytes: 1 << 20}, Max: Figures{ReadIOPS: 3}}
	if err != nil || len(target.Settings.IO) != 1 || target.Settings.IO[0] != want {
		t.Errorf("with the decision: %+v, %v, want %+v", target.Settings.IO, err, want)
	}
	if s.IO[1] != ios[1] {
		t.Errorf("the decision changed what policy says: %+v", s.IO)
	}
}
