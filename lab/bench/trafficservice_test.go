package bench

import (
	"slices"
	"strings"
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

func TestTrafficInstalled(t *testing.T) {
	count := func(all []trafficSetup) (n int) {
		for _, su := range all {
			n += len(su.cases)
		}
		return n
	}
	all := trafficCatalogue()
	for _, tt := range []struct {
		missing      string
		cases, notes int
	}{{"", 60, 0}, {"redis", 54, 1}, {"nginx", 53, 1}, {"redis nginx", 47, 2}} {
		list, notes := trafficInstalled(all, func(program string) bool { return !strings.Contains(tt.missing, program) })
		if count(list) != tt.cases || len(notes) != tt.notes {
			t.Errorf("without %q: %d cases and notes %q, want %d and %d", tt.missing, count(list), notes, tt.cases, tt.notes)
		}
	}
	if count(all) != 60 {
		t.Errorf("the catalogue has changed to %d cases", count(all))
	}
	n := needs{have: func(string) bool { return false }}
	n.met("postgres")
	if notes := n.notes(); !slices.Equal(notes, []string{"postgres is not installed (Debian package postgresql): the cases with it were left out"}) {
		t.Errorf("notes %q", notes)
	}
}
