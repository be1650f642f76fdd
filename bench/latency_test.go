package bench

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// A round trip is held against the one at the NIC that began at the same time, and
// against none if there is no such.
func TestWireBias(t *testing.T) {
	zero := time.Unix(1000, 0)
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	var wire []rig.Trip
	for i := range 3 {
		wire = append(wire, rig.Trip{Asked: ms(10 * i), Answered: ms(10*i + 2)})
	}
	near := 50 * time.Microsecond
	trips := []api.LatencyTrip{
		{Time: zero.Add(near), Raw: 0.005, Corrected: 0.0021}, {Time: zero.Add(ms(15)), Raw: 9, Corrected: 9},
		{Time: zero.Add(ms(20) - near), Raw: 0.006, Corrected: 0.0019},
	}
	raw, corrected, err := wireBias(trips, wire, zero)
	if err != nil || len(raw) != 2 || len(corrected) != 2 {
		t.Fatalf("%v, %v, %v", raw, corrected, err)
	}
	for i, want := range []float64{0.003, 0.0001, 0.004, -0.0001} {
		if got := append(raw[:1:1], corrected[0], raw[1], corrected[1])[i]; math.Abs(got-want) > 1e-9 {
			t.Errorf("%d: %v, want %v", i, got, want)
		}
	}
	// Of two that are near, the nearer one.
	wire = []rig.Trip{{Asked: ms(0), Answered: ms(1)}, {Asked: ms(0) + 100*time.Microsecond, Answered: ms(3)}}
	trips[1] = api.LatencyTrip{Time: zero.Add(90 * time.Microsecond), Raw: 0.005, Corrected: 0.003}
	if _, corrected, err = wireBias(trips[1:2], wire, zero); err != nil || math.Abs(corrected[0]-0.0001) > 1e-9 {
		t.Errorf("%v, %v", corrected, err)
	}
	trips[1].Time = zero.Add(ms(15))
	if _, _, err := wireBias(trips[1:2], wire, zero); err == nil {
		t.Error("a trip that the NIC has not seen is held against another")
	}
}
