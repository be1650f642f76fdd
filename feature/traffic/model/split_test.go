package model

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Packets of others are cut exactly where a latency that may ask for it needs it.
func TestSplit(t *testing.T) {
	const us = time.Microsecond
	bulk := policy.Net{Weight: 5}
	old := func(l Link) Link { l.Splits = false; return l }
	for _, tt := range []struct {
		name  string
		link  Link
		nets  []policy.Net
		split []identity.Slot // classes that split packets; 0: the default class
		err   string          // "": none
	}{
		{"not needed", link(gbit), []policy.Net{bulk, {Latency: 2000 * us, Split: true}}, nil, ""},
		{"needed, not allowed", link(gbit), []policy.Net{bulk, {Latency: 200 * us}}, nil,
			"possible with: a latency of at least 540µs, or latency.split on, as packets of the others are split to at most 1522 bytes then"},
		{"needed and allowed", link(gbit), []policy.Net{bulk, {Latency: 200 * us, Split: true}}, []identity.Slot{0, 1}, ""},
		{"allowed, and not enough", link(gbit), []policy.Net{bulk, {Latency: 10 * us, Split: true}}, nil, "up to 1522 bytes, takes 12µs"},
		{"allowed by another", link(gbit), []policy.Net{{Latency: 200 * us, Split: true}, {Latency: 200 * us}}, nil, "or latency.split on"},
		{"of two, both need it", link(gbit), []policy.Net{{Latency: 200 * us, Split: true}, {Rate: mbit, Latency: 300 * us, Split: true}}, []identity.Slot{0, 1, 2}, ""},
		{"of two, one needs it", link(gbit), []policy.Net{{Rate: mbit, Latency: 5000 * us}, {Rate: mbit, Latency: 200 * us, Split: true}}, []identity.Slot{0, 1}, ""},
		{"allowed without a latency", link(gbit), []policy.Net{{Weight: 5, Split: true}, bulk}, nil, ""},
		{"allowed without a latency, and not by who needs it", link(gbit), []policy.Net{{Weight: 5, Split: true}, {Latency: 200 * us}}, nil, "or latency.split on"},
		{"the kernel cannot", old(link(gbit)), []policy.Net{bulk, {Latency: 200 * us, Split: true}}, nil, "this kernel cannot split packets of others, as it has no TBF; possible with: a latency of at least 540µs"},
		{"the kernel cannot, and nobody asks for it", old(link(gbit)), []policy.Net{bulk, {Latency: 200 * us}}, nil, "possible with: a latency of at least 540µs"},
		{"packets are no longer than frames", Link{Name: "eth0", Rate: gbit, MTU: 1514, Splits: true}, []policy.Net{bulk, {Latency: 20 * us, Split: true}}, nil, "up to 1514 bytes"},
	} {
		for _, hfsc := range []bool{false, true} {
			l := tt.link
			l.HFSC = hfsc
			p, err := Compute(l, tenants(tt.nets...))
			if tt.err != "" {
				if !errors.Is(err, ErrInfeasible) || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("%s, HFSC %v: %+v, %v; want %q", tt.name, hfsc, p, err, tt.err)
				}
				if !l.Splits && strings.Contains(err.Error(), "latency.split on") {
					t.Errorf("%s, HFSC %v: %v, which the kernel cannot", tt.name, hfsc, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s, HFSC %v: %v", tt.name, hfsc, err)
				continue
			}
			var got []identity.Slot
			for _, c := range p.Classes {
				if c.Split > 0 {
					got = append(got, c.Slot)
				}
				if c.Split != 0 && c.Split != p.Split {
					t.Errorf("%s: class %d is cut to %d, all to %d", tt.name, c.Slot, c.Split, p.Split)
				}
			}
			if !slices.Equal(got, tt.split) || len(got) > 0 && p.Split != 1522 {
				t.Errorf("%s, HFSC %v: packets of %v are cut to %d bytes, want of %v", tt.name, hfsc, got, p.Split, tt.split)
			}
		}
	}
}

// With splitting, the turns of HTB are those of frames, and the curve of the tenant that needs it
// has all the time that is left.
func TestSplitParameters(t *testing.T) {
	ts := []Tenant{tenant(1, policy.Net{Weight: 1}), tenant(2, policy.Net{Weight: 1, Latency: 200 * time.Microsecond, Split: true})}
	p := compute(t, link(gbit), ts...)
	testkit.Same(t, "quantum", uint32(1522), p.Classes[1].HTB.Quantum)
	ts[1].Net = policy.Net{Rate: mbit, Latency: 200 * time.Microsecond, Split: true}
	p = compute(t, curves(gbit), ts...)
	want, ok := realTime(p.Link, 1522, promised(ts[1], p.Classes[2]), 1514, 200*time.Microsecond)
	if got := p.Classes[2].HFSC.RealTime; !ok || got != want || got.D < 187*time.Microsecond {
		t.Errorf("curve %+v, want %+v", got, want)
	}
}
