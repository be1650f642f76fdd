package model

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// after returns the bits that a curve has promised by t.
func after(c qdisc.Curve, t time.Duration) float64 {
	if t <= c.D {
		return float64(c.M1) * t.Seconds()
	}
	return float64(c.M1)*c.D.Seconds() + float64(c.M2)*(t-c.D).Seconds()
}

// realTime returns a curve by which burst bytes of a class with a guaranteed rate leave within latency,
// and whether such a curve exists.
//
// The paper's formulas (1) and (2) are wrong as printed. The time that is lost is that of the largest
// packet of *any* class at the rate of the *link*, not of the class's own packet at its own rate, which
// gives 20 ms - 120 ms in the paper's own example. And r·L is 250 bytes there, less than one packet.
// With sigma the burst, Lmax the largest packet (lmax, in bytes) and R the link:
//
//	d  = L - Lmax/R
//	m1 = max(r, sigma/d)
//	m2 = r
func realTime(l Link, lmax int, rate uint64, burst int, latency time.Duration) (qdisc.Curve, bool) {
	if latency == 0 {
		return qdisc.Curve{M1: rate, M2: rate}, true
	}
	d := latency - wire(lmax, l.Rate)
	if d <= 0 {
		return qdisc.Curve{}, false
	}
	m1 := muldiv(uint64(burst)*8, uint64(time.Second), uint64(d)) + 1 // rounded up
	if m1 <= rate {
		return qdisc.Curve{M1: rate, M2: rate}, true
	}
	return qdisc.Curve{M1: m1, D: d, M2: rate}, m1 <= l.Rate
}

// promised is the rate of a class's real-time curve in bit/s: its own rate, and half of its share by
// weight. The other half comes from link sharing, a little later when a class with a latency wakes up.
// If it were promised too, no latency could be.
func promised(t Tenant, c Class) uint64 {
	return max(c.Guaranteed-(c.Guaranteed-min(t.Rate, c.Guaranteed))/2, minShare)
}

// wire returns the transmission time of a packet at a rate, rounded up.
func wire(bytes int, rate uint64) time.Duration {
	return time.Duration(muldiv(uint64(bytes)*8, uint64(time.Second), rate) + 1)
}

// feasible reports whether all latencies can be kept at once: even if all classes wake up at the same
// moment, their curves never promise more than the link carries. ts and classes are in the same order.
func feasible(l Link, ts []Tenant, classes []Class) error {
	var curves []qdisc.Curve
	for i, t := range ts {
		c, ok := realTime(l, l.largest(t), promised(t, classes[i]), l.MTU, t.Latency)
		if !ok {
			return tooShort(l, t)
		}
		curves = append(curves, c)
	}
	at, most := crossing(l, curves)
	if at == 0 {
		return nil
	}
	// Among the tenants that need more at first than later, the one with the highest slot is refused, and
	// the one with the greatest need is named.
	last, greedy := -1, -1
	for i, c := range curves {
		if c.D > 0 {
			last = i
		}
	}
	for i, c := range curves {
		if i != last && c.D > 0 && (greedy < 0 || c.M1 > curves[greedy].M1) {
			greedy = i
		}
	}
	if last < 0 {
		// Without latencies the promises are rates, which are already admitted.
		return tooMany(l, ts)
	}
	r := &Refusal{Slot: ts[last].Slot, Key: "latency", err: ErrInfeasible,
		Reason: fmt.Sprintf("within %s all that wake at once are promised %s of the %s link", at, policy.FormatRate(uint64(most/at.Seconds())), policy.FormatRate(l.Rate))}
	if greedy >= 0 {
		r.Reason += fmt.Sprintf("; of the others %s needs the most, %s for its %s", ts[greedy].Name, policy.FormatRate(curves[greedy].M1), ts[greedy].Latency)
	}
	if need, ok := leastLatency(l, ts[last], promised(ts[last], classes[last]), curves, last); ok {
		r.Mend = fmt.Sprintf("a latency of at least %s", need)
	}
	return r
}

// tooMany refuses the last of too many tenants on a slow link, which cannot give each the least share.
func tooMany(l Link, ts []Tenant) error {
	return &Refusal{Slot: ts[len(ts)-1].Slot, Key: "rate", err: ErrOverLink,
		Reason: fmt.Sprintf("%d tenants with at least %s each are too many for the %s link", len(ts), policy.FormatRate(minShare), policy.FormatRate(l.Rate))}
}

// crossing returns a time by which the curves promise more than the link can carry, and the bits
// promised; 0 if there is none. The promise is linear between the breakpoints of the curves, and grows
// no faster than the link in the end.
func crossing(l Link, curves []qdisc.Curve) (time.Duration, float64) {
	// A time far beyond any breakpoint stands for the end.
	at := []time.Duration{time.Hour}
	for _, c := range curves {
		if c.D > 0 {
			at = append(at, c.D)
		}
	}
	for _, t := range at {
		var sum float64
		for _, c := range curves {
			sum += after(c, t)
		}
		// One millionth allows for the rounding of each m1.
		if sum > float64(l.Rate)*t.Seconds()*(1+1e-6) {
			return t, sum
		}
	}
	return 0, 0
}

// leastLatency returns the shortest latency of one tenant with which all curves fit, up to the longest
// that policy allows.
func leastLatency(l Link, t Tenant, rate uint64, curves []qdisc.Curve, i int) (time.Duration, bool) {
	const step, longest = 10 * time.Microsecond, 10 * time.Second
	fits := func(latency time.Duration) bool {
		c, ok := realTime(l, l.largest(t), rate, l.MTU, latency)
		if !ok {
			return false
		}
		others := append([]qdisc.Curve(nil), curves...)
		others[i] = c
		at, _ := crossing(l, others)
		return at == 0
	}
	low, high := t.Latency/step, longest/step
	if !fits(high * step) {
		return 0, false
	}
	for low+1 < high {
		if mid := (low + high) / 2; fits(mid * step) {
			high = mid
		} else {
			low = mid
		}
	}
	return high * step, true
}

// tooShort refuses a latency shorter than one packet of another tenant, or than the tenant's own
// burst.
func tooShort(l Link, t Tenant) error {
	lmax := l.largest(t)
	lost := wire(lmax, l.Rate)
	own := wire(l.MTU, l.Rate)
	r := &Refusal{Slot: t.Slot, Key: "latency", err: ErrInfeasible,
		Reason: fmt.Sprintf("a packet of any other container, which has up to %d bytes, takes %s on the %s link", lmax, lost.Round(time.Microsecond), policy.FormatRate(l.Rate)),
		Mend:   fmt.Sprintf("a latency of at least %s", roundUp(lost+own)),
	}
	if lost < t.Latency {
		r.Reason += fmt.Sprintf(", and its own %d bytes take %s", l.MTU, own.Round(time.Microsecond))
	}
	return r
}

func roundUp(d time.Duration) time.Duration {
	const step = 10 * time.Microsecond
	return (d + step - 1) / step * step
}

// inTurn reports whether HTB, which has no deadlines, can keep all latencies. HTB serves a class within
// its own rate before any that borrows, and among these the smallest prio first (net/sched/sch_htb.c,
// htb_dequeue). So only the tenants with a latency have the smallest prio. Such a tenant i waits for
// one packet of another class that is being sent, for its own burst, and for the other tenants with a
// latency. Each of these may send its burst and one packet more, because HTB checks the burst before it
// sends and not after, and then its guaranteed rate:
//
//	delay_i = (Lmax + sigma_i + sum_j (sigma_j + Lmax)) / (R - sum_j r_j)
//
// with j over the other tenants with a latency, and the rest as in realTime. Unlike a curve of
// HFSC, the first place is all or nothing: such a tenant also comes first for idle bandwidth.
func inTurn(l Link, ts []Tenant, classes []Class) error {
	var sum uint64
	for i, t := range ts {
		sum += promised(t, classes[i]) // at most the link's rate each
	}
	if sum > l.Rate {
		return tooMany(l, ts)
	}
	for i := len(ts) - 1; i >= 0; i-- { // the newest first, because it is the one to refuse
		if ts[i].Latency == 0 {
			continue
		}
		if need := turn(l, ts, classes, i); need > ts[i].Latency {
			return tooLate(l, ts, classes, i, need)
		}
	}
	return nil
}

// turn returns the longest time that a packet of tenant i waits.
func turn(l Link, ts []Tenant, classes []Class, i int) time.Duration {
	lmax := l.largest(ts[i])
	bytes, rate := uint64(lmax+l.MTU), l.Rate
	for j, t := range ts {
		if j != i && t.Latency > 0 {
			bytes += uint64(ownBurst(l) + lmax)
			rate -= min(classes[j].Guaranteed, rate-1)
		}
	}
	const longest = 1000 * time.Hour
	return time.Duration(min(muldiv(bytes*8, uint64(time.Second), rate), uint64(longest))) + 1
}

// ownBurst is how much an urgent tenant may send at once, in bytes. Saved-up bandwidth delays the other
// urgent tenants, so it is no more than a tenant needs.
func ownBurst(l Link) int { return 2 * l.MTU }

// tooLate refuses tenant i, which would wait longer than its latency.
func tooLate(l Link, ts []Tenant, classes []Class, i int, need time.Duration) error {
	others, greedy := 0, -1
	for j, t := range ts {
		if j == i || t.Latency == 0 {
			continue
		}
		others++
		if greedy < 0 || classes[j].Guaranteed > classes[greedy].Guaranteed {
			greedy = j
		}
	}
	if others == 0 {
		return tooShort(l, ts[i])
	}
	return &Refusal{Slot: ts[i].Slot, Key: "latency", err: ErrInfeasible,
		Reason: fmt.Sprintf("under HTB it may have to wait for %s on the %s link: %d other containers with a latency can come before it, of which %s has the most, %s",
			roundUp(need), policy.FormatRate(l.Rate), others, ts[greedy].Name, policy.FormatRate(classes[greedy].Guaranteed)),
		Mend: fmt.Sprintf("a latency of at least %s", roundUp(need)),
	}
}
