package bench

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// TestWireBias compares a round trip with the one at the NIC that began at the same time, and with
// none if there is no such trip.
func TestWireBias(t *testing.T) {
	zero := time.Unix(1000, 0)
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	var wire []rig.Trip
	for i := range 3 {
		wire = append(wire, rig.Trip{Asked: ms(10 * i), Answered: ms(10*i + 2)})
	}
	trips := []api.LatencyTrip{
		{Time: zero, Raw: 0.005, Corrected: 0.0021}, {Time: zero.Add(ms(15)), Raw: 9, Corrected: 9},
		{Time: zero.Add(ms(20)), Raw: 0.006, Corrected: 0.0019},
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
	if _, _, err := wireBias(trips, nil, zero); err == nil {
		t.Error("a trip that the NIC has not seen is held against another")
	}

	// The clocks were read with an error larger than the time between requests.
	wire, trips = nil, nil
	at := time.Duration(0)
	for i := range 50 {
		at += time.Duration(80+i*i%17) * time.Microsecond
		took := time.Duration(i+1) * time.Microsecond
		wire = append(wire, rig.Trip{Asked: at, Answered: at + took})
		if i >= 10 { // the first are forgotten
			trips = append(trips, api.LatencyTrip{Time: zero.Add(at + time.Millisecond), Corrected: took.Seconds()})
		}
	}
	_, corrected, err = wireBias(trips, wire, zero)
	if err != nil || len(corrected) != 40 {
		t.Fatalf("%v, %v", corrected, err)
	}
	for i, c := range corrected {
		if math.Abs(c) > 1e-9 {
			t.Errorf("%d is held against another: off by %v", i, c)
		}
	}
}
