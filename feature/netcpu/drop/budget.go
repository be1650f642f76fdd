package drop

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Budgets have what comes for containers that are charged dropped once it has cost
// their budget. That happens at the host end of the veth and at the uplinks, in the
// softirq itself: user space only says how much is allowed until when. Allow and
// Dropped may be called at any time; the lock of Programs is not needed for them. A
// nil *Budgets has no container.
type Budgets struct {
	programs *Programs
	meter    *account.Meter

	mu sync.Mutex
	of map[uint64]*Tenant // by network namespace
}

// NewBudgets makes one without a container.
func NewBudgets(p *Programs, meter *account.Meter) *Budgets {
	return &Budgets{programs: p, meter: meter, of: make(map[uint64]*Tenant)}
}

// Begin has the packets that come to c's network namespace, which is ns, counted and
// dropped at c's expense. Nothing is dropped before Allow has said so.
func (b *Budgets) Begin(find *netdev.Finder, ns *netdev.NS, c container.Container) error {
	b.mu.Lock()
	t := b.of[c.NetNS]
	b.mu.Unlock()
	if t != nil && t.owner != c.ID { // what it changed on the host goes with its owner
		if err := b.End(c.NetNS); err != nil {
			return err
		}
		t = nil
	}
	if t == nil {
		var err error
		if t, err = b.programs.Add(c.ID); err != nil {
			return err
		}
		// No thread of its own: nothing waits in a ring.
		if err := t.UseRing(false); err != nil {
			return errors.Join(err, t.Close())
		}
		b.mu.Lock()
		b.of[c.NetNS] = t
		b.mu.Unlock()
	}
	return t.CountVeths(find, ns, c)
}

// End ends that for a network namespace.
func (b *Budgets) End(netns uint64) error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	t := b.of[netns]
	delete(b.of, netns)
	b.mu.Unlock()
	if t == nil {
		return nil
	}
	return t.Close()
}

// Close ends it for all.
func (b *Budgets) Close() error {
	if b == nil {
		return nil
	}
	var errs []error
	for netns := range b.of {
		errs = append(errs, b.End(netns))
	}
	return errors.Join(errs...)
}

// Allow lets a container's packets take so much of others' time from now on, for so
// long. ledger.Unlimited is any time.
func (b *Budgets) Allow(id container.ID, budget, lasts time.Duration) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.of {
		if t.owner != id {
			continue
		}
		slot, known := b.meter.Slot(id)
		if budget == ledger.Unlimited || !known {
			return t.unlimited()
		}
		var charges int64
		if err := b.meter.Charges().Lookup(slot, &charges); err != nil {
			return fmt.Errorf("charges of container %v: %w", id, err)
		}
		return t.limit(slot, charges+budget.Nanoseconds(), lasts)
	}
	return nil // its packets do not come by a veth, or another pays for them
}

// Dropped returns how many packets were dropped, by the container that pays.
func (b *Budgets) Dropped() map[container.ID]uint64 {
	of := make(map[container.ID]uint64)
	if b == nil {
		return of
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.of {
		if c, err := t.Counters(); err == nil {
			of[t.owner] = c.Beyond
		}
	}
	return of
}
