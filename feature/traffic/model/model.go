// Package model divides one link between containers: it takes what policy asks
// for, and returns the classes of a shaper (CNTC, section 3). It is pure
// arithmetic and knows nothing of the host. Rates are in bit/s, sizes in bytes.
//
// A set of guarantees that the link cannot keep is refused as a whole, with a
// reason; it is never scaled down. Package traffic calls this package, and makes
// the classes.
package model

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/policy"
)

// Link is a device through which packets leave.
type Link struct {
	Name string
	Rate uint64 // bit/s; 0: not known, see Unkept
	MTU  int    // bytes of a frame on the wire, link header included
	// MaxPacket is the largest packet that the device accepts in one piece, in
	// bytes, super-packets (GSO) included; 0 is MTU. Nothing can overtake a
	// packet that is being sent.
	MaxPacket int
	// Splits says that the shaper can split packets of a class into frames.
	Splits bool
	// Below is the longest time that a packet waits after the shaper, as in the
	// device's ring.
	Below time.Duration
	// HFSC says that the shaper is of this kind, and not HTB.
	HFSC bool
	// Received says that the packets have passed the link before they are shaped.
	Received bool
}

// Tenant is one network tenant and what is due to it on the Link.
type Tenant struct {
	Slot identity.Slot
	Name string // for reasons
	policy.Net
	// Bare says that nobody but the cgroup tree tells of it; see maxBare.
	Bare bool
	// Burst is how much it may send at once and still have all of it leave
	// within Latency, in bytes; 0 is one full frame.
	Burst int
}

// Class is what one tenant gets. That of identity.Nobody is everybody else's: the
// host's own packets, and those of containers without policy.
type Class struct {
	Slot       identity.Slot
	Guaranteed uint64 // bit/s, also while all others want everything; 0: the link's rate is not known
	Ceil       uint64 // bit/s, also while nobody else wants anything; 0: all that such a link carries
	Weight     uint64 // share of what is idle, in the unit of Plan.PerWeight
	Level      int    // order for what is idle, 0 to 7, the smallest first
	Split      int    // packets that are larger are cut into frames, bytes; 0: none are
	HTB        HTB
	HFSC       HFSC
}

// Plan is how a Link is divided.
type Plan struct {
	Link    Link
	Root    HTB     // of the class that all others borrow from
	Top     HFSC    // the same of HFSC
	Classes []Class // by Slot; the first is that of identity.Nobody

	// The paper's B_s, B_d, W_s and W_d: what is promised to those with a
	// rate, what is divided by weight, and the weights of both kinds, in
	// thousandths.
	Static, Dynamic             uint64
	StaticWeight, DynamicWeight uint64
	// PerWeight is the bandwidth that one unit of weight stands for, bit/s.
	PerWeight uint64
	// Split is the Class.Split of those classes that have one; 0: none has, and
	// every latency is kept without.
	Split int
}

// levels is how many priorities HTB has (TC_HTB_NUMPRIO).
const levels = 8

// unit is a weight of 1. Weights of tenants with a rate result from a division,
// so they need fractional digits.
const unit = 1000

// defaultWeight is the weight of a tenant with neither weight nor rate.
const defaultWeight = 1

// minShare is the least rate that anybody is guaranteed, in bit/s, because a
// class of HTB cannot have a rate of 0. It is policy's least rate, and needs no
// admission: the 5 % that are never promised have room for it.
const minShare = 1000

// admitted is the part of a link that may be promised, in percent; see
// policy.FitLink, which decides.
const admitted = 95

// maxBare is the part of a link that may be promised to all bare tenants together,
// in percent: whoever may make cgroups must not take the rest.
const maxBare = 50

// Compute divides a link among tenants, and everybody else. This is Algorithm 1
// of the paper as a function of the whole set, so that it does not matter in
// which order containers came and went:
//
//   - who has a rate gets it (line 11), and the weight that it amounts to (25);
//   - who has a weight gets its part of the rest (28), up to its ceil; what a
//     ceil leaves over goes to the others;
//   - who has both gets both; who has neither has a weight of 1.
//
// On a link whose rate is not known it keeps what can be kept; see Link.Unkept.
//
// A tenant whose promise cannot be kept gives a *Refusal; of several, the one
// with the highest slot, as that is likely to have come last.
func Compute(l Link, tenants []Tenant) (Plan, error) {
	if l.MaxPacket == 0 {
		l.MaxPacket = l.MTU
	}
	if l.Rate > 0 && l.Rate < minShare || l.MTU <= 0 || l.MaxPacket < l.MTU || l.Below < 0 {
		return Plan{}, fmt.Errorf("divide link %q: impossible link: rate %d bit/s, mtu %d, largest packet %d", l.Name, l.Rate, l.MTU, l.MaxPacket)
	}
	if l.Rate == 0 {
		return unknown(l, tenants)
	}
	ts, err := admit(l, tenants)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{Link: l}
	return p.share(ts, l.Rate/100*admitted)
}

// share gives each tenant its class; most is what may be promised in all, bit/s.
func (p Plan) share(ts []Tenant, most uint64) (_ Plan, err error) {
	l := p.Link
	for _, t := range ts {
		p.Static += t.Rate
		if t.weighted() {
			p.DynamicWeight += uint64(t.Weight) * unit
		}
	}
	if p.Static < most {
		p.Dynamic = most - p.Static
	}
	shares := divide(p.Dynamic, ts)
	// The bandwidth of a unit of weight, from the shares that no ceil limits. The
	// default class has no ceil, so there is always such a share.
	p.PerWeight = max(shares[0]/defaultWeight, minShare)
	lvl := ranks(l, ts)
	for i, t := range ts {
		c := Class{
			Slot: t.Slot, Guaranteed: max(t.Rate+shares[i], minShare), Ceil: t.Ceil,
			Level: lvl[i], Weight: uint64(t.Weight) * unit,
		}
		if !t.weighted() {
			c.Weight = max(muldiv(t.Rate, unit, p.PerWeight), 1)
			p.StaticWeight += c.Weight
		}
		p.Classes = append(p.Classes, c)
	}
	if ts, err = p.fit(ts); err != nil {
		return Plan{}, err
	}
	p.parameters(ts)
	return p, nil
}

// weighted says whether a tenant has a part in what is divided by weight.
func (t Tenant) weighted() bool { return t.Weight > 0 }

// admit checks what can be checked before anything is divided. It returns the
// tenants by slot, with defaults filled in, after the default class.
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
			t.Ceil = l.Rate // a higher one never holds anything back
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
				return nil, &Refusal{Slot: t.Slot, Key: "rate", err: policy.ErrOverLink,
					Reason: fmt.Sprintf("cgroups without a runtime may be promised %d %% of the %s link together", maxBare, policy.FormatRate(l.Rate)),
					Mend:   "a smaller rate for them"}
			}
		}
	}
	if err := policy.FitLink(l.Rate, rates); err != nil {
		return nil, overLink(l, ts, err)
	}
	return ts, nil
}

// overLink says whose rate does not fit, and which one would.
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
		if others += t.Rate; others > most || t.Rate > most { // also when it runs over
			others = most
		}
		if biggest < 0 || t.Rate > ts[biggest].Rate {
			biggest = i
		}
	}
	r := &Refusal{Slot: ts[last].Slot, Key: "rate", Reason: why.Error(), err: policy.ErrOverLink}
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

// divide gives each tenant its part of pool by weight, but no more than the room
// between its rate and its ceil. It divides what a ceil leaves over among the
// others. Tenants without weight get nothing. Fractions of a bit are dropped.
func divide(pool uint64, ts []Tenant) []uint64 {
	order := make([]int, 0, len(ts))
	var weights uint64
	for i, t := range ts {
		if t.weighted() {
			order = append(order, i)
			weights += uint64(t.Weight)
		}
	}
	// Sorted by whose ceil is reached first, in bandwidth per unit of weight.
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

// ranks gives each tenant a level by its priority: those without one come last.
// For more different priorities than there are levels each level is an interval
// of them (the paper's priority intervals), cut anew by rank for each set of
// tenants: the levels are evenly used however the numbers lie. Under HTB the
// first level is for tenants with a latency, if there are any: see inTurn.
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

// urgent says whether a tenant must be served before all others for its latency
// to be kept.
func (t Tenant) urgent(l Link) bool { return !l.HFSC && t.Latency > 0 }

// muldiv is a*b/c without overflow on the way, at most the largest number;
// 0 for c = 0.
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

// ErrOverCeil is what a Refusal wraps for a rate above the ceil.
var ErrOverCeil = errors.New("rate above ceil")

// ErrInfeasible is what a Refusal wraps for a latency that cannot be kept.
var ErrInfeasible = errors.New("latency cannot be kept")

// Refusal says why one tenant cannot get what is due to it. It wraps
// policy.ErrOverLink, ErrOverCeil or ErrInfeasible.
type Refusal struct {
	Slot   identity.Slot
	Key    string // "rate" or "latency"
	Reason string // which limit, and which other container where there is one
	Mend   string // what would make it possible; "" for nothing

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
