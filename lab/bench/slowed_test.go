package bench

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// The figure is the API's, of the container with the name, and the report has its distance from the
// victim's own count.
func TestSlowedFigures(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	before := &api.NetCPU{Since: at, Taken: at, Accounts: []api.NetCPUAccount{{Container: 7, Name: "victim"}}}
	none := 0.0
	after := &api.NetCPU{Since: at, Taken: at.Add(10 * time.Second), Accounts: []api.NetCPUAccount{
		{Container: 7, Name: "victim", Tasks: 10, Waited: &none, Stolen: 4, StolenBy: []api.NetCPUCulprit{{Container: 8, Seconds: 4}}},
	}}
	said := slowedBetween(before, after, "victim")
	if math.Abs(said-0.4) > 1e-9 || !math.IsNaN(slowedBetween(before, after, "another")) {
		t.Errorf("%v", said)
	}
	got := map[string]float64{}
	for _, f := range (undisturbed{work: 1000}).slowedFigures(500, said) {
		got[f.metric] = f.value
	}
	if got[Slowed] != 0.5 || got[SlowedSaid] != said || math.Abs(got[SlowedOff]-0.1) > 1e-9 {
		t.Errorf("%v", got)
	}
	// What slows it in any case is no part of what a case does to it.
	for _, f := range (undisturbed{work: 1000, said: 0.2}).slowedFigures(500, 0.6) {
		got[f.metric] = f.value
	}
	if math.Abs(got[SlowedSaid]-0.5) > 1e-9 || math.Abs(got[SlowedOff]) > 1e-9 {
		t.Errorf("%v", got)
	}
}

// A worklog has the work between any two moments that it covers, as if it were steady between its
// entries.
func TestWorklog(t *testing.T) {
	at := func(s float64) time.Time {
		return time.Unix(1_800_000_000, 0).Add(time.Duration(s * float64(time.Second)))
	}
	l := &worklog{read: func() uint64 { return 0 }}
	for i, done := range []uint64{0, 100, 400} {
		l.add(at(float64(i)), done)
	}
	if got := l.until(at(1.5)) - l.until(at(0.5)); got != 200 {
		t.Errorf("%v done", got)
	}
	if !math.IsNaN(l.until(at(-1))) || !math.IsNaN(l.until(at(3))) || l.until(at(0)) != 0 || l.until(at(2)) != 400 {
		t.Error("beyond its ends, or at them")
	}
}
