package charge

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// costs converts accounts into the ledgers' costs.
func costs(r account.Reading, credits bool) map[container.ID]cost {
	out := make(map[container.ID]cost, len(r.Accounts))
	for id, a := range r.Accounts {
		if id == account.System {
			continue
		}
		c := cost{Charge: a.CPU(), Took: a.Took}
		if credits {
			c.Charge -= a.Own
			c.Credit = a.Robbed
		}
		out[id] = c
	}
	return out
}
