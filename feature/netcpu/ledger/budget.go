package ledger

import "time"

// Unlimited is the Budget of a container without a limit on its packets' time.
const Unlimited time.Duration = -1

// Budget is the paper's `exhausted` as a number: the network time on the container's behalf that
// each coming period may contain. Beyond it, its incoming packets have to be dropped until the next
// period starts; 0 drops all of them, and Unlimited none. reserve is the T of the paper, as a part of the
// entitlement: packets are dropped when no more than this is left of a period.
//
// The time of its own tasks is subtracted, as far as that leaves the network half of the total: on
// a kernel without debits within a period the two cannot race for the rest, as they do in the
// paper, and neither may starve the other. A container in debt has less by its debt.
func (l *Ledger) Budget(reserve float64) time.Duration {
	all := float64(l.limit.Quota) + l.pay(1)
	if l.state.Balance <= -horizon*l.limit.Quota {
		return 0 // its cost would be forgiven: it must not arise
	}
	return remaining(time.Duration(all), time.Duration(l.own), reserve)
}

// remaining returns how much of the entitlement all is the network's while a container's own tasks
// use own; see [Ledger.Budget].
func remaining(all, own time.Duration, reserve float64) time.Duration {
	return time.Duration(max(0, (1-reserve)*float64(max(all-own, all/2))))
}
