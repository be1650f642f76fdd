// Package model divides one link between containers: it converts policy to the classes of a shaper
// (CNTC, section 3). It is pure arithmetic and does not touch the host. Rates are in bit/s, sizes in
// bytes.
//
// It refuses a set of guarantees that the link cannot keep as a whole, with a reason, and never
// scales it down. Package traffic calls it, and makes the classes.
package model

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Link is a device through which packets leave.
type Link struct {
	Name string
	Rate uint64 // bit/s; 0: not known, see Unkept
	MTU  int    // bytes of a frame on the wire, link header included
	// MaxPacket is the largest packet that the device accepts in one piece, in bytes, including
	// super-packets (GSO); 0 is MTU. Nothing can overtake a packet that is being sent.
	MaxPacket int
	// Splits: the shaper can split packets of a class into frames.
	Splits bool
	// HFSC: the shaper is HFSC, not HTB.
	HFSC bool
	// Received: packets have passed the link before they are shaped.
	Received bool
}

// Tenant is one network tenant and its due on the Link.
type Tenant struct {
	Slot identity.Slot
	Name string // for Refusal.Reason
	policy.Net
	// Bare: only the cgroup tree reports it; see maxBare.
	Bare bool
}

// Class is the bandwidth of one tenant. identity.Nobody has the default class, for the host's own
// packets and containers without policy.
type Class struct {
	Slot       identity.Slot
	Guaranteed uint64 // bit/s, whatever others send; 0: the link's rate is unknown
	Ceil       uint64 // bit/s on an idle link; 0: all that a link of unknown rate carries
	Weight     uint64 // share of idle bandwidth, in units of Plan.PerWeight
	Level      int    // order for idle bandwidth, 0 to 7, the smallest first
	Split      int    // larger packets are cut into frames, bytes; 0: no splitting
	HTB        qdisc.HTB
	HFSC       qdisc.HFSC
}

// Plan is the division of a Link.
type Plan struct {
	Link    Link
	Root    qdisc.HTB  // of the class that lends to all others
	Top     qdisc.HFSC // the same for HFSC
	Classes []Class    // by Slot; the first is that of identity.Nobody

	// PerWeight is the bandwidth of one unit of weight, bit/s.
	PerWeight uint64
	// Split is the Class.Split of the classes that have one; 0: every latency is kept without
	// splitting.
	Split int
}

// levels is how many priorities HTB has (TC_HTB_NUMPRIO).
const levels = 8

// unit is a weight of 1. Weights of tenants with a rate result from a division, so they need
// fractional digits.
const unit = 1000

// defaultWeight is the weight of a tenant with neither weight nor rate.
const defaultWeight = 1

// minShare is the smallest guaranteed rate, in bit/s, because HTB does not allow a rate of 0. It is the
// smallest rate of policy, and needs no admission, because it fits into the 5 % that are never
// promised.
const minShare = 1000

// maxBare limits what all bare tenants together are promised, in percent of the link, so that a process
// that may create cgroups cannot take the rest.
const maxBare = 50

// Compute divides a link among tenants and the default class. This is Algorithm 1 of the paper as a
// function of the whole set, so that the order of arrival does not matter:
//
//   - a tenant with a rate gets it (line 11), and the weight that it amounts to (25);
//   - a tenant with a weight gets its part of the rest (28), up to its ceil; the others get what a
//     ceil leaves over;
//   - a tenant with both gets both, and one with neither has a weight of 1.
//
// On a link of unknown rate it keeps what it can; see Link.Unkept.
//
// If a promise cannot be kept, it returns a *Refusal; of several, the one for the highest slot, which
// likely came last.
func Compute(l Link, tenants []Tenant) (Plan, error) {
	if l.MaxPacket == 0 {
		l.MaxPacket = l.MTU
	}
	if l.Rate > 0 && l.Rate < minShare || l.MTU <= 0 || l.MaxPacket < l.MTU {
		return Plan{}, fmt.Errorf("divide link %q: impossible link: rate %d bit/s, mtu %d, largest packet %d", l.Name, l.Rate, l.MTU, l.MaxPacket)
	}
	if l.Rate == 0 {
		return unknown(l, tenants)
	}
	ts, err := admit(l, tenants)
	if err != nil {
		return Plan{}, err
	}
	return Plan{Link: l}.share(ts, l.Rate/100*admitted)
}

// share assigns each tenant its class. most limits the sum of all promises, in bit/s.
func (p Plan) share(ts []Tenant, most uint64) (_ Plan, err error) {
	l := p.Link
	static := uint64(0) // the paper's B_s: what is promised as rates; the rest is its B_d
	for _, t := range ts {
		static += t.Rate
	}
	shares := divide(most-min(static, most), ts)
	// The default class shows the bandwidth of a unit of weight, because it has no ceil that limits its
	// share.
	p.PerWeight = max(shares[0]/defaultWeight, minShare)
	lvl := ranks(l, ts)
	for i, t := range ts {
		c := Class{
			Slot: t.Slot, Guaranteed: max(t.Rate+shares[i], minShare), Ceil: t.Ceil,
			Level: lvl[i], Weight: uint64(t.Weight) * unit,
		}
		if !t.weighted() {
			c.Weight = max(muldiv(t.Rate, unit, p.PerWeight), 1)
		}
		p.Classes = append(p.Classes, c)
	}
	if ts, err = p.fit(ts); err != nil {
		return Plan{}, err
	}
	p.parameters(ts)
	return p, nil
}

// weighted reports whether a tenant takes part in the division by weight.
func (t Tenant) weighted() bool { return t.Weight > 0 }

// admit makes the checks that need no division. It returns the tenants by slot, with defaults filled
// in, after the default class.
func admit(l Link, tenants []Tenant) ([]Tenant, error) {
	ts := append([]Tenant{{Slot: identity.Nobody, Name: "the host and containers without policy"}}, tenants...)
	slices.SortStableFunc(ts, func(a, b Tenant) int { return cmp.Compare(a.Slot, b.Slot) })
	var rates []uint64
	var bare uint64
	for i := range ts {
		t := &ts[i]
		if i > 0 && t.Slot == ts[i-1].Slot || t.Slot > identity.Max {
			return nil, fmt.Errorf("divide link %q: slot %d of %q is not its own", l.Name, t.Slot, t.Name)
		}
		if t.Ceil == 0 || t.Ceil > l.Rate {
			t.Ceil = l.Rate // a higher one limits nothing
		}
		if t.Rate > t.Ceil && t.Rate <= l.Rate {
			return nil, &Refusal{Slot: t.Slot, Key: "rate", err: ErrOverCeil,
				Reason: fmt.Sprintf("the rate %s is more than the ceil %s", policy.FormatRate(t.Rate), policy.FormatRate(t.Ceil)),
				Mend:   "a ceil of at least the rate"}
		}
		if t.Weight == 0 && t.Rate == 0 {
			t.Weight = defaultWeight
		}
		t.Split = t.Split && t.Latency > 0
		rates = append(rates, t.Rate)
		if t.Bare && t.Rate > 0 {
			if bare += t.Rate; bare > l.Rate/100*maxBare || t.Rate > l.Rate {
				return nil, &Refusal{Slot: t.Slot, Key: "rate", err: ErrOverLink,
					Reason: fmt.Sprintf("cgroups without a runtime may be promised %d %% of the %s link together", maxBare, policy.FormatRate(l.Rate)),
					Mend:   "a smaller rate for them"}
			}
		}
	}
	if err := fitLink(l.Rate, rates); err != nil {
		return nil, overLink(l, ts, err)
	}
	return ts, nil
}

// overLink names a rate that does not fit, and a rate that would.
func overLink(l Link, ts []Tenant, why error) error {
	last := len(ts) - 1
	for ts[last].Rate == 0 {
		last--
	}
	most, others, biggest := l.Rate/100*admitted, uint64(0), -1
	for i, t := range ts {
		if i == last || t.Rate == 0 {
			continue
		}
		if others += t.Rate; others > most || t.Rate > most { // also on overflow
			others = most
		}
		if biggest < 0 || t.Rate > ts[biggest].Rate {
			biggest = i
		}
	}
	r := &Refusal{Slot: ts[last].Slot, Key: "rate", Reason: why.Error(), err: ErrOverLink}
	if others < most {
		r.Mend = "a rate of at most " + policy.FormatRate(most-others)
	} else {
		r.Mend = "less for the others"
	}
	if biggest >= 0 {
		r.Mend += fmt.Sprintf("; of the others %s has the most, %s", ts[biggest].Name, policy.FormatRate(ts[biggest].Rate))
	}
	return r
}

// divide assigns each tenant its part of pool by weight, up to the difference of its ceil and its rate.
// The other tenants share what a ceil leaves over. Tenants without weight get nothing. Fractions of a
// bit are dropped.
func divide(pool uint64, ts []Tenant) []uint64 {
	order := make([]int, 0, len(ts))
	var weights uint64
	for i, t := range ts {
		if t.weighted() {
			order = append(order, i)
			weights += uint64(t.Weight)
		}
	}
	// Sorted by the bandwidth per unit of weight that reaches the ceil.
	room := func(i int) uint64 { return ts[i].Ceil - ts[i].Rate }
	slices.SortFunc(order, func(a, b int) int {
		h1, l1 := bits.Mul64(room(a), uint64(ts[b].Weight))
		h2, l2 := bits.Mul64(room(b), uint64(ts[a].Weight))
		return cmp.Or(cmp.Compare(h1, h2), cmp.Compare(l1, l2), cmp.Compare(a, b))
	})
	shares := make([]uint64, len(ts))
	for n, i := range order {
		w := uint64(ts[i].Weight)
		if share := muldiv(pool, w, weights); share <= room(i) {
			// No tenant after this one is limited by its ceil either.
			for _, j := range order[n:] {
				shares[j] = min(muldiv(pool, uint64(ts[j].Weight), weights), room(j))
			}
			break
		}
		shares[i] = room(i)
		pool -= room(i)
		weights -= w
	}
	return shares
}

// ranks assigns each tenant a level by its priority; tenants without one come last. If there are more
// priorities than levels, each level covers an interval of priorities (the paper's priority intervals).
// The intervals are cut by rank for each set of tenants, so that the levels are evenly used. Under HTB
// the first level is for tenants with a latency, if there are any: see inTurn.
func ranks(l Link, ts []Tenant) []int {
	const none = 1 << 62
	of := func(t Tenant) int {
		if t.Priority == nil {
			return none
		}
		return *t.Priority
	}
	first := 0
	var distinct []int
	for _, t := range ts {
		if t.urgent(l) {
			first = 1
			continue
		}
		distinct = append(distinct, of(t))
	}
	slices.Sort(distinct)
	distinct = slices.Compact(distinct)
	out := make([]int, len(ts))
	for i, t := range ts {
		if t.urgent(l) {
			continue
		}
		rank, _ := slices.BinarySearch(distinct, of(t))
		if left := levels - first; len(distinct) > left {
			rank = rank * left / len(distinct)
		}
		out[i] = first + rank
	}
	return out
}

// urgent reports whether a tenant's latency requires that it is served first.
func (t Tenant) urgent(l Link) bool { return !l.HFSC && t.Latency > 0 }

// muldiv returns a*b/c without intermediate overflow, at most the largest number; 0 for c = 0.
func muldiv(a, b, c uint64) uint64 {
	if c == 0 {
		return 0
	}
	hi, lo := bits.Mul64(a, b)
	if hi >= c {
		return 1<<64 - 1
	}
	q, _ := bits.Div64(hi, lo, c)
	return q
}

// ErrOverCeil is wrapped by a Refusal for a rate above the ceil.
var ErrOverCeil = errors.New("rate above ceil")

// ErrInfeasible is wrapped by a Refusal for a latency that cannot be kept.
var ErrInfeasible = errors.New("latency cannot be kept")

// Refusal reports why one tenant cannot get its due. It wraps ErrOverLink, ErrOverCeil or
// ErrInfeasible.
type Refusal struct {
	Slot   identity.Slot
	Key    string // "rate" or "latency"
	Reason string // the limit, and the other container if there is one
	Mend   string // the remedy; "": there is none

	err error
}

func (r *Refusal) Error() string {
	if r.Mend == "" {
		return r.Key + " refused: " + r.Reason
	}
	return r.Key + " refused: " + r.Reason + "; possible with: " + r.Mend
}

// Unwrap returns the kind of the refusal.
func (r *Refusal) Unwrap() error { return r.err }

// ErrOverLink is wrapped by a Refusal for guarantees that a link cannot keep.
var ErrOverLink = errors.New("guaranteed rates exceed the link")

// admitted is the part of a link that can be promised, in percent. The rest is for the host, and for
// headers that the rates do not count.
const admitted = 95

// Admitted returns how much of a link can be promised, in bit/s.
func Admitted(link uint64) uint64 { return link/100*admitted + link%100*admitted/100 }

// fitLink checks that the guaranteed rates of the tenants of one link add up to at most 95 % of it; all
// in bit/s. It ignores rates of zero, which guarantee nothing. The error wraps [ErrOverLink] and states
// the sum.
func fitLink(link uint64, rates []uint64) error {
	var sum uint64
	tenants, overflow := 0, false
	for _, r := range rates {
		all, carry := bits.Add64(sum, r, 0)
		sum, overflow = all, overflow || carry != 0
		if r > 0 {
			tenants++
		}
	}
	limit := Admitted(link)
	if !overflow && sum <= limit {
		return nil
	}
	text := policy.FormatRate(sum)
	if overflow {
		text = "more than " + policy.FormatRate(1<<64-1)
	}
	return fmt.Errorf("%w: the sum of %d is %s, and %d %% of the %s link is %s", ErrOverLink, tenants, text, admitted, policy.FormatRate(link), policy.FormatRate(limit))
}

// Stand-ins for an unknown link rate, bit/s.
const (
	fastest = 1 << 40 // faster than any link: the device limits a class before HTB does
	usual   = 1_000_000_000
	// slowest is divided by weight before any priority counts, so that a container with a high priority
	// leaves at least that to all others, including the host. Without priorities fastest is divided: the
	// turns are the same, and a class that does not borrow costs less CPU time.
	slowest = 10_000_000
)

// Unkept lists those of a tenant's keys that this link does not keep because its rate is unknown. A
// ceil is kept in any case. So are weights and priorities of what is sent: the device takes no more
// than the link carries, and packets wait in their order. Received packets have already passed the
// link, so nothing waits.
func (l Link) Unkept(keys []string) (unkept []string) {
	for _, k := range keys {
		if l.Rate == 0 && (k == "rate" || k == "latency" || l.Received && k != "ceil") {
			unkept = append(unkept, k)
		}
	}
	return unkept
}

// unknown is Compute for a link of unknown rate.
func unknown(l Link, tenants []Tenant) (Plan, error) {
	kept, own := make([]Tenant, len(tenants)), uint64(fastest)
	for i, t := range tenants {
		t.Rate, t.Latency = 0, 0
		if l.Received {
			t.Weight, t.Priority = 0, nil
		}
		if t.Priority != nil {
			own = slowest
		}
		kept[i] = t
	}
	l.Rate, l.HFSC = fastest, false
	ts, err := admit(l, kept)
	if err != nil {
		return Plan{}, err
	}
	p, err := Plan{Link: l}.share(ts, own)
	if err != nil {
		return Plan{}, err
	}
	p.Link.Rate = 0
	for i := range p.Classes {
		c := &p.Classes[i]
		c.Guaranteed = 0
		if c.Ceil == fastest {
			c.Ceil = 0
		}
	}
	return p, nil
}
