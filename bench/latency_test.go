package bench

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// A round trip is held against the one at the NIC that began at the same time, and
// against none if there is no such.
func TestUplinkBias(t *testing.T) {
	at := time.Unix(1000, 0)
	ms := func(n int) time.Time { return at.Add(time.Duration(n) * time.Millisecond) }
	s := &uplinkStamps{port: 9}
	packet := func(port byte, out bool) []byte {
		p := make([]byte, 28)
		p[0], p[9] = 0x45, 17
		if out {
			p[23] = port
		} else {
			p[21] = port
		}
		return p
	}
	for i := range 3 {
		s.take(packet(9, true), true, ms(10*i))
		s.take(packet(8, false), false, ms(10*i+1)) // another flow's
		s.take(packet(9, false), false, ms(10*i+2))
		s.take(packet(9, false), false, ms(10*i+3)) // asked for by nobody
	}
	s.take([]byte{0x45}, true, ms(50))
	if len(s.trips) != 3 {
		t.Fatalf("%+v", s.trips)
	}
	near := 50 * time.Microsecond
	trips := []api.LatencyTrip{
		{Time: ms(0).Add(near), Raw: 0.005, Corrected: 0.0021}, {Time: ms(15), Raw: 9, Corrected: 9}, {Time: ms(20).Add(-near), Raw: 0.006, Corrected: 0.0019},
	}
	raw, corrected, err := s.bias(trips)
	if err != nil || len(raw) != 2 || len(corrected) != 2 {
		t.Fatalf("%v, %v, %v", raw, corrected, err)
	}
	for i, want := range []float64{0.003, 0.0001, 0.004, -0.0001} {
		if got := append(raw[:1:1], corrected[0], raw[1], corrected[1])[i]; math.Abs(got-want) > 1e-9 {
			t.Errorf("%d: %v, want %v", i, got, want)
		}
	}
	if _, _, err := s.bias(trips[1:2]); err == nil {
		t.Error("a trip that the NIC has not seen is held against another")
	}
}

// Each bar is of a case and a figure that there are, and each case has one.
func TestLatencyBars(t *testing.T) {
	with := make(map[string]bool)
	for _, b := range LatencyBars() {
		with[b.Case] = true
		if b.Why == "" || b.Low < b.FarLow || b.High > b.FarHigh {
			t.Errorf("%+v", b)
		}
	}
	for _, c := range latencyCatalogue() {
		if !with[c.name] {
			t.Errorf("%s has no bar", c.name)
		}
		delete(with, c.name)
	}
	if len(with) > 0 {
		t.Errorf("bars without a case: %v", with)
	}
	if all := pingSteps(false); len(all) != 11 || all[0] != 0 || all[10] != mostPings {
		t.Errorf("steps %v", all)
	}
}
