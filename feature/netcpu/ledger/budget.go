package ledger

import "time"

// DefaultReserve is the T of the paper, in parts of the entitlement: packets are
// dropped when no more than this is left of a period.
const DefaultReserve = 0.05

// Unlimited is the Budget of a container whose packets may take any time.
const Unlimited time.Duration = -1

// Budget is `exhausted` as a number: the network time on the container's behalf
// that each coming period may hold. Past it, its incoming packets have to be
// dropped until the next period begins; 0 drops all of them, and Unlimited none.
// reserve is T, between 0 and 1 (see [ValidReserve]).
//
// What its own tasks use is taken off, as far as that leaves the network half
// of what there is: a kernel that knows no debit within a period cannot make
// the two race for the rest, as the paper's does, and neither may starve the
// other. A container in debt has so much less.
func (l *Ledger) Budget(reserve float64) time.Duration {
	all := float64(l.limit.Quota) + l.pay(1)
	if l.state.Balance <= -MaxDebt*l.limit.Quota {
		return 0 // what comes now would be forgiven: it must not come
	}
	return budget(all, l.own, reserve)
}

func budget(all, own, reserve float64) time.Duration {
	return time.Duration(max(0, (1-reserve)*max(all-own, all/2)))
}

// ValidReserve says whether T makes sense: 0 drops at exhaustion only, and
// something has to be left below 1.
func ValidReserve(t float64) bool { return t >= 0 && t < 1 }
