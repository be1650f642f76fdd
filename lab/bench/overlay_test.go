package bench

import (
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/lab/load"
)

// TestOverlayFigures divides a window's CPU time by the work done in it.
func TestOverlayFigures(t *testing.T) {
	w := load.Window{Seconds: 2, Ops: 1000, Bytes: 4000}
	for _, c := range []struct {
		name string
		c    overlayCase
		w    load.Window
		want []figure
	}{
		{"requests", overlayCase{}, w, []figure{{Requests, "1/s", 500}, {RequestCPU, "s", 0.003}, {P50, "s", 0}, {P99, "s", 0}, {StalledFlows, "1", 7}}},
		{"bulk", overlayCase{bulk: true}, w, []figure{{Received, "bit/s", 16000}, {ByteCPU, "s", 0.00075}}},
		{"nothing came", overlayCase{}, load.Window{Seconds: 2}, []figure{{Requests, "1/s", 0}, {P50, "s", 0}, {P99, "s", 0}, {StalledFlows, "1", 7}}},
	} {
		if got := overlayFigures(c.c, c.w, 3, 7); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
