package model

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// Without the link's rate ceils, weights and priorities are kept.
func TestUnknownRate(t *testing.T) {
	p := compute(t, link(0),
		tenant(1, policy.Net{Weight: 1, Priority: prio(7)}),
		tenant(2, policy.Net{Weight: 2, Priority: prio(3)}),
		tenant(3, policy.Net{Ceil: 50 * mbit}),
		tenant(4, policy.Net{Rate: 100 * gbit, Latency: time.Nanosecond}))
	if p.Link.Rate != 0 {
		t.Errorf("link %+v", p.Link)
	}
	var levels []int
	for i, c := range p.Classes {
		levels = append(levels, c.Level)
		if want := []uint64{0, 0, 0, 50 * mbit, 0}[i]; c.Ceil != want || c.Guaranteed != 0 {
			t.Errorf("class %d: guaranteed %d, ceil %d, want %d", i, c.Guaranteed, c.Ceil, want)
		}
		if want := []uint64{fastest, fastest, fastest, 50 * mbit, fastest}[i]; c.HTB.Ceil != want {
			t.Errorf("class %d: HTB has the ceil %d, want %d", i, c.HTB.Ceil, want)
		}
		// Priorities starve no tenant, and no promise exceeds what any link has.
		weight := []uint64{1, 1, 2, 1, 1}[i]
		if want := slowest / 6 * weight; c.HTB.Rate/10 != want/10 {
			t.Errorf("class %d: HTB has the rate %d, want %d", i, c.HTB.Rate, want)
		}
		testkit.Same(t, fmt.Sprintf("class %d: quantum", i), uint32(weight)*p.Classes[0].HTB.Quantum, c.HTB.Quantum)
	}
	testkit.Same(t, "levels", []int{2, 1, 0, 2, 2}, levels)
}

// What was received cannot be reordered: only its ceils are kept.
func TestUnknownRateReceived(t *testing.T) {
	l := link(0)
	l.Received = true
	p := compute(t, l, tenant(1, policy.Net{Weight: 5, Priority: prio(0)}), tenant(2, policy.Net{Ceil: 50 * mbit}))
	if a, b := p.Classes[0], p.Classes[1]; a.Level != b.Level || a.HTB.Quantum != b.HTB.Quantum {
		t.Errorf("%+v\n%+v", a, b)
	}
	if c := p.Classes[2]; c.Ceil != 50*mbit || c.HTB.Ceil != c.Ceil {
		t.Errorf("%+v", c)
	}
}

func TestUnkept(t *testing.T) {
	all := []string{"rate", "ceil", "weight", "priority", "latency"}
	for _, tt := range []struct {
		link Link
		want []string
	}{
		{Link{Rate: gbit}, nil},
		{Link{Rate: gbit, Received: true}, nil},
		{Link{}, []string{"rate", "latency"}},
		{Link{Received: true}, []string{"rate", "weight", "priority", "latency"}},
	} {
		testkit.Same(t, fmt.Sprintf("%+v", tt.link), tt.want, tt.link.Unkept(all))
		if got := tt.link.Unkept([]string{"ceil"}); got != nil {
			t.Errorf("%+v: of a ceil %q", tt.link, got)
		}
	}
}
