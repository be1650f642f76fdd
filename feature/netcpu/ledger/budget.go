package ledger

import "time"

// Unlimited is the Budget of a container that has no limit on the time of its packets.
const Unlimited time.Duration = -1

// Budget returns the time of the container's packets that each coming period may contain. Beyond it,
// incoming packets have to be dropped until the next period starts; 0 drops all of them, Unlimited
// none. It is the paper's `exhausted` as a number. reserve is the paper's T, as a part of the
// entitlement: packets are dropped when no more than this part of a period is left.
//
// Budget subtracts the time of the container's own tasks, but leaves at least half of the total to
// packets. In the paper tasks and packets race for the rest of a period; a stock kernel cannot debit
// packets within a period, and neither may starve the other. A debt reduces the total.
func (l *Ledger) Budget(reserve float64) time.Duration {
	all := float64(l.limit.Quota) + l.pay(1)
	if l.state.Balance <= -horizon*l.limit.Quota {
		return 0 // more cost would only be forgiven
	}
	return remaining(time.Duration(all), time.Duration(l.own), reserve)
}

// remaining returns the packets' part of the entitlement all while the container's tasks use own; see
// [Ledger.Budget].
func remaining(all, own time.Duration, reserve float64) time.Duration {
	return time.Duration(max(0, (1-reserve)*float64(max(all-own, all/2))))
}
