package model

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// some draws a link and tenants, sane and otherwise.
func some(t *rapid.T) (Link, []Tenant) {
	l := Link{
		Name: "eth0", Rate: rapid.Uint64Range(minShare, 1e15).Draw(t, "link"), MTU: rapid.IntRange(64, 9018).Draw(t, "mtu"),
		MaxPacket: rapid.SampledFrom([]int{0, 65536, 524288}).Draw(t, "gso"),
		HFSC:      rapid.Bool().Draw(t, "hfsc"),
	}
	part := func(name string) uint64 {
		return muldiv(l.Rate, rapid.Uint64Range(0, 120).Draw(t, name), 100)
	}
	var ts []Tenant
	for i := range rapid.IntRange(0, 20).Draw(t, "tenants") {
		var n policy.Net
		if rapid.Bool().Draw(t, "rate?") {
			n.Rate = part("rate") / 8
		}
		if rapid.Bool().Draw(t, "ceil?") {
			n.Ceil = max(n.Rate, part("ceil"))
		}
		if rapid.Bool().Draw(t, "weight?") {
			n.Weight = rapid.Uint32Range(1, 10000).Draw(t, "weight")
		}
		if rapid.Bool().Draw(t, "priority?") {
			n.Priority = prio(rapid.IntRange(0, 65535).Draw(t, "priority"))
		}
		if rapid.IntRange(0, 3).Draw(t, "latency?") == 0 {
			n.Latency = time.Duration(rapid.Int64Range(int64(10*time.Microsecond), int64(100*time.Millisecond)).Draw(t, "latency"))
		}
		ts = append(ts, Tenant{Slot: identity.Slot(i*3 + 1), Name: fmt.Sprintf("c%d", i), Net: n})
	}
	return l, ts
}

func TestRandomPlans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, ts := some(t)
		p, err := Compute(l, ts)
		if err != nil {
			checkRefusal(t, l, ts, err)
			return
		}
		net := map[identity.Slot]Tenant{identity.Nobody: {}}
		for _, x := range ts {
			net[x.Slot] = x
		}
		urgent := slices.ContainsFunc(ts, func(x Tenant) bool { return x.Latency > 0 })
		var sum, m1, slack uint64
		for _, c := range p.Classes {
			want := net[c.Slot]
			sum += c.Guaranteed
			m1 += c.HFSC.RealTime.M1
			slack += minShare + 2
			switch {
			case c.Guaranteed < want.Rate:
				t.Fatalf("%+v is guaranteed less than its rate %d", c, want.Rate)
			case c.Guaranteed > c.Ceil && c.Guaranteed > minShare, want.Ceil != 0 && c.Ceil > want.Ceil:
				t.Fatalf("%+v is guaranteed more than its ceil", c)
			case c.HTB.Rate == 0 || c.HTB.Quantum < uint32(l.MTU) || c.HTB.Burst < uint32(l.MTU) || c.HTB.CBurst < uint32(l.MTU) || c.HTB.Prio > 7:
				t.Fatalf("%+v: HTB would not take that", c)
			case c.HFSC.RealTime.M2 == 0 || c.HFSC.LinkShare.M2 == 0:
				t.Fatalf("%+v: would be starved under HFSC", c)
			}
			if !l.HFSC && (want.Latency > 0 && c.Level != 0 || want.Latency == 0 && c.Level == 0 && urgent) {
				t.Fatalf("%+v has the level %d", want, c.Level)
			}
			if l.HFSC && want.Latency > 0 && want.Rate > 0 && c.HFSC.RealTime.D > 0 {
				// The promise: one frame by the deadline, after the largest packet of another.
				d := c.HFSC.RealTime.D
				if lost := wire(p.Link.MaxPacket, l.Rate); d+lost > want.Latency+2 || after(c.HFSC.RealTime, d) < float64(l.MTU)*8*(1-1e-6) {
					t.Fatalf("%+v breaks the latency %s", c, want.Latency)
				}
			}
		}
		if limit := l.Rate / 100 * admitted; sum > limit+slack {
			t.Fatalf("%d bit/s are guaranteed, of %d", sum, limit)
		}
		if l.HFSC && float64(m1) > float64(l.Rate)*(1+1e-5)+float64(slack) {
			t.Fatalf("at first %d bit/s are promised, of %d", m1, l.Rate)
		}
		for _, a := range p.Classes {
			for _, b := range p.Classes {
				checkPair(t, net[a.Slot], net[b.Slot], a, b, p)
			}
		}
		again := append([]Tenant(nil), ts...)
		rand.New(rand.NewPCG(1, 2)).Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
		if q, err := Compute(l, again); err != nil || !reflect.DeepEqual(p, q) {
			t.Fatalf("another order gives another plan: %v", err)
		}
	})
}

// checkPair checks the relation of any two classes.
func checkPair(t *rapid.T, ta, tb Tenant, a, b Class, p Plan) {
	pa, pb := 1<<62, 1<<62
	if ta.Priority != nil {
		pa = *ta.Priority
	}
	if tb.Priority != nil {
		pb = *tb.Priority
	}
	inOrder := p.Link.HFSC || ta.Latency == 0 && tb.Latency == 0 // else the one with a latency comes first
	if inOrder && (pa == pb && a.Level != b.Level || pa < pb && a.Level > b.Level) {
		t.Fatalf("priorities %d and %d have the levels %d and %d", pa, pb, a.Level, b.Level)
	}
	plain := func(x Tenant) bool { return x.Rate == 0 && x.Ceil == 0 }
	if plain(ta) && plain(tb) && a.Guaranteed > minShare && b.Guaranteed > minShare {
		wa, wb := uint64(max(ta.Weight, 1)), uint64(max(tb.Weight, 1))
		x, y := float64(a.Guaranteed)/float64(wa), float64(b.Guaranteed)/float64(wb)
		if d := x - y; d > 2 || d < -2 {
			t.Fatalf("weights %d and %d get %d and %d", wa, wb, a.Guaranteed, b.Guaranteed)
		}
	}
}

// checkRefusal checks that a refusal has a reason, and that its advice helps as far as the refused
// tenant alone is concerned.
func checkRefusal(t *rapid.T, l Link, ts []Tenant, err error) {
	var r *Refusal
	if !errors.As(err, &r) || r.Reason == "" {
		t.Fatalf("%v: no reason", err)
	}
	proposed, ok := strings.CutPrefix(r.Mend, "a latency of at least ")
	if !ok || !errors.Is(err, ErrInfeasible) {
		return
	}
	proposed, _, _ = strings.Cut(proposed, ",")
	d, perr := time.ParseDuration(proposed)
	if perr != nil {
		t.Fatalf("%v: %v", err, perr)
	}
	again := append([]Tenant(nil), ts...)
	for i := range again {
		if again[i].Slot == r.Slot {
			if d <= again[i].Latency {
				t.Fatalf("%v: was refused %s", err, again[i].Latency)
			}
			again[i].Latency = d
		}
	}
	// Another one may still be refused, or this one because of another's curve, but never for the
	// same reason.
	var next *Refusal
	if _, err := Compute(l, again); errors.As(err, &next) && next.Slot == r.Slot && next.Reason == r.Reason {
		t.Fatalf("%v; with that: %v", r, next)
	}
}

// A new tenant takes from tenants with weights only.
func TestRandomArrival(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, ts := some(t)
		if len(ts) == 0 {
			return
		}
		before, err1 := Compute(l, ts[:len(ts)-1])
		after, err2 := Compute(l, ts)
		if err1 != nil || err2 != nil {
			return
		}
		for i, c := range before.Classes {
			now := after.Classes[i]
			var x Tenant
			if i > 0 {
				x = ts[i-1]
			}
			switch {
			case x.Rate > 0 && x.Weight == 0 && now.Guaranteed != c.Guaranteed:
				t.Fatalf("the rate %d was guaranteed %d, now %d", x.Rate, c.Guaranteed, now.Guaranteed)
			case now.Guaranteed > c.Guaranteed+1 && now.Guaranteed > minShare:
				t.Fatalf("%d got more by the arrival of another: %d, now %d", c.Slot, c.Guaranteed, now.Guaranteed)
			}
		}
	})
}
