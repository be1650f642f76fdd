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
	addSlowed(func(metric, _ string, v float64) { got[metric] = v }, 1000, 500, said)
	if got[Slowed] != 0.5 || got[SlowedSaid] != said || math.Abs(got[SlowedOff]-0.1) > 1e-9 {
		t.Errorf("%v", got)
	}
}
