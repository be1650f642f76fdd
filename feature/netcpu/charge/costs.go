package charge

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// Costs converts accounts into the ledgers' costs. credits: the kernel charges a task for the
// softirqs that interrupt it. Without that, no task has paid for others, and there is nothing to
// give back.
func Costs(r account.Reading, credits bool) map[container.ID]Cost {
	out := make(map[container.ID]Cost, len(r.Accounts))
	for _, a := range r.Accounts {
		if a.Container == account.System {
			continue
		}
		c := Cost{Charge: a.CPU(), Took: a.Took}
		if credits {
			c.Charge -= a.Own
			c.Credit = a.Robbed
		}
		out[a.Container] = c
	}
	return out
}
