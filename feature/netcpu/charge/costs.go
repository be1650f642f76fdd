package charge

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// Costs turns accounts into what the ledgers book. credits says whether the
// kernel charges a task for the softirqs that interrupt it: where it does not,
// nobody has paid for others and nobody is to be given anything back.
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
