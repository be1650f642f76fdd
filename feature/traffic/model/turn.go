package model

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// inTurn answers whether all latencies can be kept by HTB, which knows no
// deadlines. It serves a class that stays within its own rate before any that
// borrows, and of those the one with the smallest prio (net/sched/sch_htb.c,
// htb_dequeue); so tenants with a latency have the smallest, and no others.
// What such a tenant i has to wait for is one packet of somebody else that is
// being sent, its own burst, and what the others like it may send: each its
// burst and one packet more, as HTB looks at what is left of a burst before it
// sends and not after, and from then on what it is guaranteed:
//
//	delay_i = (Lmax + sigma_i + sum_j (sigma_j + Lmax)) / (R - sum_j r_j) + D0
//
// with j over the other tenants with a latency, and the rest as in realTime.
// Unlike a curve of HFSC the place in front is not for sale by parts: such a
// tenant also comes first for what is idle.
func inTurn(l Link, ts []Tenant, classes []Class) error {
	var sum uint64
	for i, t := range ts {
		sum += promised(t, classes[i]) // as much as a link has at the most, each
	}
	if sum > l.Rate {
		return tooMany(l, ts)
	}
	for i := len(ts) - 1; i >= 0; i-- { // the newest first: it is the one to refuse
		if ts[i].Latency == 0 {
			continue
		}
		if need := turn(l, ts, classes, i); need > ts[i].Latency {
			return tooLate(l, ts, classes, i, need)
		}
	}
	return nil
}

// turn returns the longest time that a packet of tenant i may have to wait.
func turn(l Link, ts []Tenant, classes []Class, i int) time.Duration {
	lmax := l.largest(ts[i])
	bytes, rate := uint64(lmax+burstOf(l, ts[i])), l.Rate
	for j, t := range ts {
		if j != i && t.Latency > 0 {
			bytes += uint64(ownBurst(l, t)) + uint64(lmax)
			rate -= min(classes[j].Guaranteed, rate-1)
		}
	}
	const longest = 1000 * time.Hour
	return time.Duration(min(muldiv(bytes*8, uint64(time.Second), rate), uint64(longest))) + 1 + l.Below
}

// ownBurst is how much an urgent tenant may send at once on its own account. Its
// savings delay the others like it, so they are no more than it needs.
func ownBurst(l Link, t Tenant) int { return max(burstOf(l, t), 2*l.MTU) }

// tooLate says why tenant i would wait for longer than its latency.
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
