package bench

import (
	"testing"

	"github.com/fairlead-project/fairlead/lab/load"
)

// TestTrafficCatalogue checks that every case can be measured: the containers that it names exist,
// its policy is valid, and no peer gets more than the link has.
func TestTrafficCatalogue(t *testing.T) {
	for _, su := range trafficCatalogue() {
		link := su.link
		if link == 0 {
			link = 100 * gbit
		}
		for _, c := range su.cases {
			who := append([]string{}, c.probe, c.fixed)
			for _, s := range c.send {
				who = append(who, s.name, s.to)
			}
			for name := range c.set {
				who = append(who, name)
			}
			for _, p := range c.phases {
				who = append(who, p.sends...)
				sum := 0.0
				for name, due := range p.due {
					who, sum = append(who, name), sum+due
				}
				if sum < 0.99 || sum > 1.01 {
					t.Errorf("%s %s %s: the shares add up to %v", su.name, c.name, p.name, sum)
				}
			}
			for _, name := range who {
				if name != "" && su.box(name) < 0 {
					t.Errorf("%s %s: there is no %s", su.name, c.name, name)
				}
			}
			var sum uint64
			for _, class := range c.tc {
				sum += class.Rate
			}
			if sum > link || len(c.tc) > len(su.boxes) {
				t.Errorf("%s %s: tc is given %d bit/s of %d", su.name, c.name, sum, link)
			}
		}
	}
}

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
