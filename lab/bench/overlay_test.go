package bench

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// TestOverlayExperiment measures a case of each kind and checks the form of the results. The
// figures are not the subject of a test.
func TestOverlayExperiment(t *testing.T) {
	testkit.NeedRoot(t)
	for _, su := range overlayCatalogue()[:2] { // the third is the second, built by engines
		t.Run(string(su.path), func(t *testing.T) {
			quick := su.path == rig.Bridged
			e := &experiment{report: &report.Report{Rounds: 2, Env: report.Env{Quick: quick}}, settle: 20 * time.Millisecond, take: 300 * time.Millisecond}
			su.cases = slices.DeleteFunc(su.cases, func(c overlayCase) bool {
				return !slices.Contains(map[bool][]string{false: {"udp rr 8", "redis"}, true: {"tcp crr", "udp bulk", "tcp bulk"}}[quick], c.name)
			})
			su.cases = slices.DeleteFunc(su.cases, func(c overlayCase) bool { return c.service != "" && !onMachine(string(c.service)) })
			must(t, e.measure(t.Context(), e.overlay(su)))
			for _, c := range su.cases {
				metric := Requests
				if c.bulk {
					metric = Received
				}
				got, _ := e.report.Find(su.caseName(c), metric)
				if len(got.Off) != 2 || slices.Max(got.Off) <= 0 {
					t.Errorf("%s: %s off is %v in 2 rounds", c.name, metric, got.Off)
				}
				if values := got.Peers[string(armHost)]; len(values) != 2 || slices.Max(values) <= 0 {
					t.Errorf("%s: %s between the hosts is %v in 2 rounds", c.name, metric, values)
				}
			}
		})
	}
	clean(t)
}

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
