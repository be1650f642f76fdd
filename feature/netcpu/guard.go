package netcpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
)

// guards drop what comes for containers that are charged once that has cost
// their budget. They do so at the host end of the veth and at the uplinks, and
// in the softirq itself: user space only says how much is allowed until when.
// The charger calls allow while others hold the lock of Netcpu, so that there is
// a lock of its own.
type guards struct {
	early *early
	meter *account.Meter

	mu sync.Mutex
	of map[uint64]*watched // by network namespace
}

// find gives the guard that a container pays for, nil if there is none.
func (g *guards) find(id container.ID) *watched {
	for _, w := range g.of {
		if w.payer == id {
			return w
		}
	}
	return nil
}

// allow lets a container's packets take so much of others' time until the next
// round. budget is for one period, which a round may hold several of.
func (g *guards) allow(id container.ID, budget, period time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.find(id)
	if w == nil {
		return nil // its packets do not come by a veth, or another pays for them
	}
	slot, known := g.meter.Slot(id)
	if budget == ledger.Unlimited || !known || period <= 0 {
		return g.early.unlimited(w)
	}
	var charges int64
	if err := g.meter.Charges().Lookup(slot, &charges); err != nil {
		return fmt.Errorf("charges of container %v: %w", id, err)
	}
	// A round that is late finds it still in force; one that does not come ends it.
	budget = time.Duration(float64(budget) * float64(chargeEvery) / float64(period))
	return g.early.limit(w, slot, charges+budget.Nanoseconds(), 2*chargeEvery)
}

// dropped returns how many packets were dropped, by the container that pays.
func (g *guards) dropped() map[container.ID]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	of := make(map[container.ID]uint64, len(g.of))
	for _, w := range g.of {
		if c, err := g.early.read(w); err == nil {
			of[w.payer] = c.Beyond
		}
	}
	return of
}

// guard brings the dropping in one network namespace to what it has to be: for
// the container in it whose account its packets are in, if that one is charged;
// and none while the namespace is isolated, whose packets one thread pays for.
func (n *Netcpu) guard(ctx context.Context, netns uint64) error {
	g := n.guards
	if g == nil {
		return nil
	}
	id, ok := n.meter.Holder(netns)
	c, charged := n.charged[id]
	if !ok || !charged || c.HostNetwork || n.tenants[netns] != nil {
		return n.unguard(netns)
	}
	ns, err := n.find.Open(filepath.Join(n.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), netns)
	if err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	defer ns.Close()
	g.mu.Lock()
	w := g.of[netns]
	g.mu.Unlock()
	if w != nil && w.payer != id { // what it changed on the host goes with its payer
		if err := n.unguard(netns); err != nil {
			return err
		}
		w = nil
	}
	if w == nil {
		if w, err = n.early.add(id); err != nil {
			return fmt.Errorf("netcpu charge: %w", err)
		}
		// No thread of its own: nothing waits in a ring.
		if err := n.early.ring(w, false); err != nil {
			return errors.Join(err, n.early.remove(w))
		}
		g.mu.Lock()
		g.of[netns] = w
		g.mu.Unlock()
	}
	if err := errors.Join(n.watchDevices(w, ns, c), n.openDoors(ctx, c)); err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	return nil
}

// unguard ends it.
func (n *Netcpu) unguard(netns uint64) error {
	g := n.guards
	if g == nil {
		return nil
	}
	g.mu.Lock()
	w := g.of[netns]
	delete(g.of, netns)
	g.mu.Unlock()
	if w == nil {
		return nil
	}
	return errors.Join(n.early.remove(w), n.restDoors())
}
