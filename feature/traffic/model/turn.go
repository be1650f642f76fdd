package model

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// inTurn reports whether HTB, which knows no deadlines, can keep all latencies. It serves a class
// within its own rate before any that borrows, and among these the smallest prio first
// (net/sched/sch_htb.c, htb_dequeue); so exactly the tenants with a latency have the smallest. Such
// a tenant i has to wait for one packet of another that is being sent, its own burst, and what the
// others like it may send: each its burst and one packet more, as HTB looks at what is left of a
// burst before it sends and not after, and from then on its guaranteed rate:
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
	for i := len(ts) - 1; i >= 0; i-- { // the newest first: it is refused
		if ts[i].Latency == 0 {
			continue
		}
		if need := turn(l, ts, classes, i); need > ts[i].Latency {
			return tooLate(l, ts, classes, i, need)
		}
	}
	return nil
}

// turn returns the longest wait of a packet of tenant i.
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

// ownBurst is how much an urgent tenant may send at once. Its savings delay the others like it, so
// they are no more than it needs.
func ownBurst(l Link) int { return 2 * l.MTU }

// tooLate refuses tenant i, which would wait for longer than its latency.
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
