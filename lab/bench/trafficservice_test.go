package bench

import (
	"testing"

	"github.com/fairlead-project/fairlead/lab/load"
)

// TestServed checks that a request without an answer in the window counts as waiting for all of it.
func TestServed(t *testing.T) {
	for _, tt := range []struct {
		ops          uint64
		p50, longest float64
	}{{0, 2, 2}, {serviceConns/2 - 1, 2, 2}, {serviceConns / 2, 0, 2}, {serviceConns, 0, 0}, {1000, 0, 0}} {
		by := make(map[string]float64)
		for _, f := range served(load.Window{Seconds: 2, Ops: tt.ops}, 7) {
			by[f.metric] = f.value
		}
		if by[P50] != tt.p50 || by[Longest] != tt.longest || by[Requests] != float64(tt.ops)/2 || by[Retransmitted] != 7 {
			t.Errorf("%d requests: %v", tt.ops, by)
		}
	}
}
