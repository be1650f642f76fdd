package netcpu

import (
	"errors"
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// rank orders the modes by strictness. The strictest mode among the members of a tenant holds for
// its packets, and among equals that of the first member.
func rank(mode policy.NetCPU) int {
	return slices.Index([]policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto, policy.NetCPUCharge, policy.NetCPUIsolate}, mode)
}

// observe begins to charge a container for its packets, whatever its mode. Any mode but observe acts
// on the accounts, which have to be complete then, as do decisions.
func (n *Netcpu) observe(t policy.Target) error {
	c, mode := t.Container, t.Settings.NetCPU
	if n.cfg.Identity == nil {
		return nil // Read returns the reason
	}
	n.used.begin(c, n.Since)
	m, err := identity.Of(c)
	m.Rank = max(0, rank(mode))
	if n.meter != nil {
		err = errors.Join(err, n.places.watch(n.meter, m, claimOf(t)), n.meter.Demand(n.places.need()))
	} else {
		_, terr := n.cfg.Identity.Tell(name, m) // the other features need the container in Identity
		err = errors.Join(err, terr)
	}
	if err != nil {
		return fmt.Errorf("netcpu observe: %w", err)
	}
	return nil
}

// forget ends observation of a container.
func (n *Netcpu) forget(id container.ID) error {
	switch {
	case n.meter != nil:
		delete(n.places.of, id)
		return errors.Join(n.meter.Forget(id), n.meter.Demand(n.places.need()))
	case n.cfg.Identity != nil:
		return n.cfg.Identity.Forget(name, id)
	}
	return nil
}

// counts returns what the kernel counts at the devices of a network namespace, by index. Account
// calls it each second, mostly for the host's namespace, and one call at a time.
func (n *Netcpu) counts(netns uint64) (counts map[int]netdev.Counters, err error) {
	if netns == n.hostNS && n.counting != nil {
		if counts, err = n.counting.Read(netdev.MostLinks); err == nil {
			return counts, nil
		}
		n.counting.Close()
		n.counting = nil
	}
	ns, err := n.find.Open("", netns)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if netns == n.hostNS { // other namespaces may be about to end, which an open socket delays
		if n.counting, err = ns.Counting(); err != nil {
			return nil, err
		}
		return n.counting.Read(netdev.MostLinks)
	}
	return ns.AllCounters(netdev.MostLinks)
}
