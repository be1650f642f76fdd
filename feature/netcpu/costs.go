package netcpu

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// costs turns accounts into what the ledgers book. credits says whether the
// kernel charges a task for the softirqs that interrupt it: where it does not,
// nobody has paid for others and nobody is to be given anything back.
func costs(r account.Reading, credits bool) map[container.ID]cost {
	out := make(map[container.ID]cost, len(r.Accounts))
	for _, a := range r.Accounts {
		if a.Container == account.System {
			continue
		}
		c := cost{charge: a.CPU(), took: a.Took}
		if credits {
			c.charge -= a.Own
			c.credit = a.Robbed
		}
		out[a.Container] = c
	}
	return out
}

// costs returns the source of what the ledgers book.
func (n *Netcpu) costs() func() (map[container.ID]cost, error) {
	credits, err := probe.SoftirqsChargeTasks(n.cfg.Roots)
	if err != nil {
		n.cfg.Log.Warn("giving nobody credit for others' packets", "feature", name, "err", err)
	}
	return func() (map[container.ID]cost, error) {
		r, err := n.meter.Accounts()
		if err != nil {
			return nil, err
		}
		return costs(r, credits), nil
	}
}
