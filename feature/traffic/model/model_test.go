package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

const (
	mbit = 1_000_000
	gbit = 1000 * mbit
)

func link(rate uint64) Link {
	return Link{Name: "eth0", Rate: rate, MTU: 1514, MaxPacket: 65536, Splits: true}
}

// curves returns a link with HFSC.
func curves(rate uint64) Link {
	l := link(rate)
	l.HFSC = true
	return l
}

func prio(p int) *int { return &p }

func tenant(s identity.Slot, n policy.Net) Tenant {
	return Tenant{Slot: s, Name: fmt.Sprintf("c%d", s), Net: n}
}

func compute(t *testing.T, l Link, ts ...Tenant) Plan {
	t.Helper()
	p, err := Compute(l, ts)
	testkit.Must(t, err)
	return p
}

// guaranteed returns the guarantee of each class, the default class first.
func guaranteed(p Plan) []uint64 {
	var out []uint64
	for _, c := range p.Classes {
		out = append(out, c.Guaranteed)
	}
	return out
}

func TestDivide(t *testing.T) {
	for _, tt := range []struct {
		name string
		nets []policy.Net // slots 1, 2, ...
		want []uint64     // on a link of 1 Gbit/s, with 950 Mbit/s to divide
	}{
		{"nobody", nil, []uint64{950 * mbit}},
		{"one weight", []policy.Net{{Weight: 1}}, []uint64{475 * mbit, 475 * mbit}},
		{"nothing but a ceil", []policy.Net{{Ceil: 100 * mbit}}, []uint64{850 * mbit, 100 * mbit}},
		{"nothing but a priority", []policy.Net{{Priority: prio(3)}}, []uint64{475 * mbit, 475 * mbit}},
		{"weights 1:2", []policy.Net{{Weight: 7}, {Weight: 11}}, []uint64{50 * mbit, 350 * mbit, 550 * mbit}},
		// Figure 9: two weights 1:2, rates of 400 and 240 Mbit/s.
		{"figure 9, one rate", []policy.Net{{Weight: 100}, {Weight: 199}, {Rate: 400 * mbit}},
			[]uint64{1833333, 183333333, 364833333, 400 * mbit}},
		{"figure 9, both rates", []policy.Net{{Weight: 100}, {Weight: 199}, {Rate: 400 * mbit}, {Rate: 240 * mbit}},
			[]uint64{1033333, 103333333, 205633333, 400 * mbit, 240 * mbit}},
		{"rate and weight", []policy.Net{{Rate: 350 * mbit, Weight: 1}, {Weight: 1}}, []uint64{200 * mbit, 550 * mbit, 200 * mbit}},
		{"what a ceil leaves", []policy.Net{{Weight: 8, Ceil: 50 * mbit}, {Weight: 2}}, []uint64{300 * mbit, 50 * mbit, 600 * mbit}},
		{"ceils one after the other", []policy.Net{{Weight: 9, Ceil: 300 * mbit}, {Weight: 9, Ceil: 40 * mbit}, {Weight: 1}},
			[]uint64{305 * mbit, 300 * mbit, 40 * mbit, 305 * mbit}},
		{"ceil above the link", []policy.Net{{Weight: 1, Ceil: 5 * gbit}}, []uint64{475 * mbit, 475 * mbit}},
		{"rate equal to the ceil", []policy.Net{{Rate: 50 * mbit, Ceil: 50 * mbit, Weight: 5}}, []uint64{900 * mbit, 50 * mbit}},
		{"all that may be promised", []policy.Net{{Rate: 950 * mbit}, {Weight: 1}}, []uint64{minShare, 950 * mbit, minShare}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var ts []Tenant
			for i, n := range tt.nets {
				ts = append(ts, tenant(identity.Slot(i+1), n))
			}
			p := compute(t, link(gbit), ts...)
			if got := guaranteed(p); fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("guaranteed %v, want %v", got, tt.want)
			}
		})
	}
}

// The sums of Algorithm 1. The paper's listing sets W_s to zero for each container, which leaves
// the weight of the last one only.
func TestSums(t *testing.T) {
	p := compute(t, link(gbit),
		tenant(1, policy.Net{Weight: 3}), tenant(2, policy.Net{Rate: 100 * mbit}), tenant(3, policy.Net{Rate: 50 * mbit}))
	// W_d is 1 for the default class and 3: 200 Mbit/s for each unit.
	testkit.Same(t, "bit/s for each weight", uint64(200*mbit), p.PerWeight)
	if a, b := p.Classes[2].Weight, p.Classes[3].Weight; a != unit/2 || b != unit/4 {
		t.Errorf("weights of the rates %d and %d, want 500, 250", a, b)
	}
	if p.Classes[0].Slot != identity.Nobody || p.Classes[0].Ceil != gbit {
		t.Errorf("everybody else: %+v", p.Classes[0])
	}
}

func TestLevels(t *testing.T) {
	for _, tt := range []struct {
		prios []int // -1: none
		want  []int // the default class has no priority and must be last
	}{
		{[]int{-1, -1}, []int{0, 0}},
		{[]int{5, -1, 2}, []int{1, 2, 0}},
		{[]int{65535, 0, 0}, []int{1, 0, 0}},
		{[]int{1, 2, 3, 4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6}},
		// Nine different ones with "none": the first two share a level.
		{[]int{1, 2, 3, 4, 5, 6, 7, 8}, []int{0, 0, 1, 2, 3, 4, 5, 6}},
		// 64, 72 and the like as in figure 6: where they lie does not matter.
		{[]int{10, 20, 30, 40, 50, 60, 70, 80, 90, 1000, 2000, 3000, 4000, 5000, 6000},
			[]int{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7}},
	} {
		var ts []Tenant
		for i, p := range tt.prios {
			n := policy.Net{}
			if p >= 0 {
				n.Priority = prio(p)
			}
			ts = append(ts, tenant(identity.Slot(i+1), n))
		}
		p := compute(t, link(gbit), ts...)
		top := 0
		for i, c := range p.Classes[1:] {
			top = max(top, c.Level)
			if c.Level != tt.want[i] || c.HTB.Prio != uint32(c.Level) {
				t.Errorf("priorities %v: level %d of the %d., want %d", tt.prios, c.Level, i+1, tt.want[i])
			}
		}
		if p.Classes[0].Level < top {
			t.Errorf("priorities %v: everybody else is at %d, before %d", tt.prios, p.Classes[0].Level, top)
		}
	}
}

// Under HTB tenants with a latency come first, with the smallest burst; HFSC has no such order.
func TestUrgent(t *testing.T) {
	nets := []Tenant{tenant(1, policy.Net{Priority: prio(0)}), tenant(2, policy.Net{Latency: 2 * time.Millisecond}), tenant(3, policy.Net{Weight: 1, Latency: 3 * time.Millisecond})}
	p := compute(t, link(gbit), nets...)
	if got := []int{p.Classes[0].Level, p.Classes[1].Level, p.Classes[2].Level, p.Classes[3].Level}; fmt.Sprint(got) != "[2 1 0 0]" {
		t.Errorf("levels %v", got)
	}
	testkit.Same(t, "burst", uint32(2*1514), p.Classes[2].HTB.Burst)
	q := compute(t, curves(gbit), nets...)
	if got := []int{q.Classes[1].Level, q.Classes[2].Level}; fmt.Sprint(got) != "[0 1]" || q.Classes[2].HFSC.RealTime.M2 == 0 {
		t.Errorf("HFSC: levels %v, %+v", got, q.Classes[2])
	}
}

func TestParameters(t *testing.T) {
	p := compute(t, link(gbit),
		tenant(1, policy.Net{Weight: 1}), tenant(2, policy.Net{Weight: 2, Ceil: 100 * mbit}), tenant(3, policy.Net{Rate: 10 * mbit}))
	if want := (qdisc.HTB{Rate: gbit, Ceil: gbit, Burst: 1250000, CBurst: 1250000, Quantum: 1514}); p.Root != want {
		t.Errorf("root %+v, want %+v", p.Root, want)
	}
	two := p.Classes[2]
	if want := (qdisc.HTB{Rate: 100 * mbit, Ceil: 100 * mbit, Burst: 125000, CBurst: 125000, Quantum: two.HTB.Quantum}); two.HTB != want {
		t.Errorf("class 2: %+v, want %+v", two.HTB, want)
	}
	if got := two.HTB.Quantum / p.Classes[1].HTB.Quantum; got != 2 {
		t.Errorf("quanta %d and %d, want 1:2", p.Classes[1].HTB.Quantum, two.HTB.Quantum)
	}
	three := p.Classes[3].HTB
	if three.Burst != 12500 || three.CBurst != 1250000 || three.Quantum < 1514 {
		t.Errorf("class 3: %+v", three)
	}
	testkit.Same(t, "upper limit", (qdisc.Curve{M1: 100 * mbit, M2: 100 * mbit}), two.HFSC.UpperLimit)
	testkit.Same(t, "upper limit without a ceil", (qdisc.Curve{}), p.Classes[1].HFSC.UpperLimit)
}

// Weights far apart: the greatest turn stays short, the smallest is a frame.
func TestQuantaFarApart(t *testing.T) {
	p := compute(t, link(gbit), tenant(1, policy.Net{Weight: 10000}), tenant(2, policy.Net{Weight: 1}))
	testkit.Same(t, "quantum of weight 10000", uint32(625000), p.Classes[1].HTB.Quantum)
	testkit.Same(t, "quantum of weight 1", uint32(1514), p.Classes[2].HTB.Quantum)
}

func TestRefusals(t *testing.T) {
	for _, tt := range []struct {
		name   string
		link   Link
		nets   []policy.Net
		slot   identity.Slot
		wraps  error
		reason string
		mend   string
	}{
		{"rate above the link", link(gbit), []policy.Net{{Rate: 2 * gbit}}, 1, ErrOverLink, "the sum of 1 is 2gbit", "a rate of at most 950mbit"},
		{"rate above 95 %", link(gbit), []policy.Net{{Rate: 951 * mbit}}, 1, ErrOverLink, "the sum of 1 is 951mbit, and 95 % of the 1gbit link is 950mbit", "a rate of at most 950mbit"},
		{"sum", link(gbit), []policy.Net{{Rate: 500 * mbit}, {Rate: 300 * mbit}, {Weight: 1}, {Rate: 200 * mbit}}, 4, ErrOverLink,
			"the sum of 3 is 1gbit", "a rate of at most 150mbit; of the others c1 has the most, 500mbit"},
		{"sum that overflows", link(gbit), []policy.Net{{Rate: 1 << 63}, {Rate: 1 << 63}}, 2, ErrOverLink, "more than", "less for the others"},
		{"rate above ceil", link(gbit), []policy.Net{{Rate: 2 * mbit, Ceil: mbit}}, 1, ErrOverCeil, "2mbit is more than the ceil 1mbit", "at least the rate"},
		{"shorter than a packet of others", link(gbit), []policy.Net{{Weight: 1}, {Latency: 500 * time.Microsecond}}, 2, ErrInfeasible,
			"up to 65536 bytes, takes 524µs on the 1gbit link", "a latency of at least 540µs, or latency.split on, as packets of the others are split to at most 1522 bytes then"},
		{"the same by curves", curves(gbit), []policy.Net{{Weight: 1}, {Latency: 500 * time.Microsecond}}, 2, ErrInfeasible,
			"up to 65536 bytes, takes 524µs on the 1gbit link", "a latency of at least 540µs, or latency.split on, as packets of the others are split to at most 1522 bytes then"},
		{"one after the other", link(gbit), []policy.Net{{Rate: 100 * mbit, Latency: 2 * time.Millisecond}, {Weight: 1}, {Rate: mbit, Latency: 1100 * time.Microsecond}}, 3, ErrInfeasible,
			"wait for 1.21ms on the 1gbit link: 1 other containers with a latency can come before it, of which c1 has the most, 100mbit", "a latency of at least 1.21ms"},
		{"who was there first", link(gbit), []policy.Net{{Rate: mbit, Latency: 600 * time.Microsecond}, {Rate: mbit, Latency: 5 * time.Millisecond}}, 1, ErrInfeasible,
			"c2 has the most, 1mbit", "a latency of at least"},
		{"too many at once", curves(100 * mbit), []policy.Net{{Latency: 5500 * time.Microsecond}, {Latency: 5500 * time.Microsecond}}, 2, ErrInfeasible,
			"of the others c1 needs the most", "a latency of at least"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var ts []Tenant
			for i, n := range tt.nets {
				ts = append(ts, tenant(identity.Slot(i+1), n))
			}
			p, err := Compute(tt.link, ts)
			var r *Refusal
			if !errors.As(err, &r) || !errors.Is(err, tt.wraps) {
				t.Fatalf("%+v, %v; want a refusal that wraps %v", p, err, tt.wraps)
			}
			if r.Slot != tt.slot || !strings.Contains(r.Reason, tt.reason) || !strings.Contains(r.Mend, tt.mend) {
				t.Errorf("slot %d: %s", r.Slot, r)
			}
		})
	}
}

// At most half of a link is promised to bare tenants, whatever the others have asked for.
func TestBare(t *testing.T) {
	bare := func(s identity.Slot, rate uint64) Tenant {
		x := tenant(s, policy.Net{Rate: rate})
		x.Bare = true
		return x
	}
	real := tenant(9, policy.Net{Rate: 450 * mbit})
	if _, err := Compute(link(gbit), []Tenant{bare(1, 300*mbit), bare(2, 200*mbit), real}); err != nil {
		t.Errorf("half of it: %v", err)
	}
	for _, ts := range [][]Tenant{{bare(1, 300*mbit), bare(2, 201*mbit)}, {bare(1, 300*mbit), bare(2, 201*mbit), real}, {bare(2, 1<<63)}, {bare(1, 1<<63), bare(2, 1<<63)}} {
		_, err := Compute(link(gbit), ts)
		var r *Refusal
		if !errors.As(err, &r) || !errors.Is(err, ErrOverLink) || !strings.Contains(r.Reason, "50 % of the 1gbit link") || !slices.ContainsFunc(ts, func(x Tenant) bool { return x.Bare && x.Slot == r.Slot }) {
			t.Errorf("%+v: %v", ts, err)
		}
	}
}

func TestImpossibleInput(t *testing.T) {
	for name, err := range map[string]error{
		"no mtu": func() error { _, err := Compute(Link{Rate: gbit}, nil); return err }(),
		"same slot": func() error {
			_, err := Compute(link(gbit), []Tenant{tenant(1, policy.Net{}), tenant(1, policy.Net{})})
			return err
		}(),
		"slot 0":     func() error { _, err := Compute(link(gbit), []Tenant{tenant(0, policy.Net{})}); return err }(),
		"slot 65535": func() error { _, err := Compute(link(gbit), []Tenant{tenant(65535, policy.Net{})}); return err }(),
	} {
		testkit.Fails(t, name, err)
	}
	// More tenants than a slow link has bits for.
	var many []Tenant
	for i := range identity.Slot(2000) {
		many = append(many, tenant(i+1, policy.Net{Weight: 1}))
	}
	var r *Refusal
	if _, err := Compute(link(mbit), many); !errors.As(err, &r) {
		t.Errorf("2000 tenants on 1 Mbit/s: %v, want a refusal", err)
	}
}

// The paper's own example and the issue's, by the corrected formulas.
func TestRealTime(t *testing.T) {
	for _, tt := range []struct {
		name    string
		link    Link
		rate    uint64
		burst   int
		latency time.Duration
		want    qdisc.Curve // M1 and D to the nearest kbit/s and microsecond
		ok      bool
	}{
		// Formula (1) as it is meant: 12 ms of a 1500-byte packet on a link of 1 Mbit/s leave 8 ms.
		// 250 bytes in that time are the paper's 250 kbit/s.
		{"the paper's 250 kbit/s for 8 ms", Link{Rate: mbit, MTU: 1500, MaxPacket: 1500}, 100_000, 250, 20 * time.Millisecond, qdisc.Curve{M1: 250_000, D: 8 * time.Millisecond, M2: 100_000}, true},
		// For a whole packet within 20 ms: 1500 bytes in 8 ms.
		{"a whole packet of it", Link{Rate: mbit, MTU: 1500, MaxPacket: 1500}, 100_000, 1500, 20 * time.Millisecond, qdisc.Curve{M1: 1_500_000}, false},
		{"2 ms at 1 Gbit/s beside super-packets", link(gbit), mbit, 1500, 2 * time.Millisecond, qdisc.Curve{M1: 8_132_000, D: 1476 * time.Microsecond, M2: mbit}, true},
		{"500 us there", link(gbit), mbit, 1500, 500 * time.Microsecond, qdisc.Curve{}, false},
		{"500 us without super-packets", Link{Rate: gbit, MTU: 1514, MaxPacket: 1514}, mbit, 1500, 500 * time.Microsecond, qdisc.Curve{M1: 24_596_000, D: 488 * time.Microsecond, M2: mbit}, true},
		{"a rate that is enough", link(gbit), 100 * mbit, 1500, 2 * time.Millisecond, qdisc.Curve{M1: 100 * mbit, D: 0, M2: 100 * mbit}, true},
		{"none asked for", link(gbit), mbit, 1500, 0, qdisc.Curve{M1: mbit, D: 0, M2: mbit}, true},
	} {
		got, ok := realTime(tt.link, tt.link.MaxPacket, tt.rate, tt.burst, tt.latency)
		got.M1, got.D = (got.M1+500)/1000*1000, got.D.Round(time.Microsecond)
		if ok != tt.ok || ok && got != tt.want {
			t.Errorf("%s: %+v, %v; want %+v, %v", tt.name, got, ok, tt.want, tt.ok)
		}
	}
}

func TestFitLink(t *testing.T) {
	for _, c := range []struct {
		link  uint64
		rates []uint64
		want  string
	}{
		{1e9, nil, ""},
		{1e9, []uint64{500e6, 450e6, 0}, ""},
		{1e9, []uint64{500e6, 450e6 + 1}, "guaranteed rates exceed the link: the sum of 2 is 950000001bit, and 95 % of the 1gbit link is 950mbit"},
		{1e9, []uint64{1e9, 0, 50e6}, "guaranteed rates exceed the link: the sum of 2 is 1050mbit, and 95 % of the 1gbit link is 950mbit"},
		{0, []uint64{1}, "guaranteed rates exceed the link: the sum of 1 is 1bit, and 95 % of the 0bit link is 0bit"},
		{1<<64 - 1, []uint64{1<<64 - 1, 1<<64 - 1}, "guaranteed rates exceed the link: the sum of 2 is more than 18446744073709551615bit, and 95 % of the 18446744073709551615bit link is 17524406870024074034bit"},
	} {
		got := ""
		if err := fitLink(c.link, c.rates); err != nil {
			got = err.Error()
		}
		testkit.Same(t, fmt.Sprintf("fitLink(%d, %d)", c.link, c.rates), c.want, got)
	}
}

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

// What was received cannot be reordered: only its ceils are kept. Without an order no class borrows.
func TestUnknownRateReceived(t *testing.T) {
	l := link(0)
	l.Received = true
	p := compute(t, l, tenant(1, policy.Net{Weight: 5, Priority: prio(0)}), tenant(2, policy.Net{Ceil: 50 * mbit}))
	if a, b := p.Classes[0], p.Classes[1]; a.Level != b.Level || a.HTB.Quantum != b.HTB.Quantum {
		t.Errorf("%+v\n%+v", a, b)
	}
	if c := p.Classes[2]; c.Ceil != 50*mbit || c.HTB.Ceil != c.Ceil || c.HTB.Rate != c.Ceil || p.Classes[1].HTB.Rate < fastest/4 {
		t.Errorf("%+v", p.Classes)
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
