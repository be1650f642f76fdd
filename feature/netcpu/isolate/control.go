package isolate

import (
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// shape is the form in which packets reach a container. As single packets all of them pass its NAPI
// thread, which isolates. As super-packets (TSO on at the host end) all pass the ordinary softirq:
// nothing is isolated, but bulk TCP is three times faster and costs so little per byte that it hardly
// disturbs others (docs/decisions/0002-shape-follows-traffic.md).
//
// A single packet takes time from no one if the softirq runs in the time of its sender or receiver,
// or on an idle CPU. Only the other single packets, the intruding ones, need isolation.
type shape int

const (
	single shape = iota
	super
)

// window counts a container's packets in some time.
type window struct {
	length    time.Duration
	intruding uint64 // single packets that take time from others
	super     uint64 // super-packets
}

// control chooses the shape of one container. One window is enough for single, the safe shape. A
// container that floods soon after it got super-packets waits twice as long for them the next time:
// otherwise a flood of a second every few seconds would never be isolated. The zero value is single.
type control struct {
	shape   shape
	calm    time.Duration // for which traffic has asked for super
	wait    time.Duration // for which it has to ask; 0: law.Patience
	granted time.Duration // since super was last chosen
}

// next counts one window and returns the shape from now on.
func (c *control) next(w window) shape {
	if w.length <= 0 {
		return c.shape
	}
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	// Bulk TCP begins at about 0.3 Gbit/s. Without it super gains nothing, so few single packets suffice.
	const few = law.Single / law.Most
	intruding, bulk, most := perSecond(w.intruding), perSecond(w.super) >= 2*law.Rate, float64(few)
	if bulk {
		most = law.Single
	}
	if c.granted += w.length; c.wait == 0 || c.shape == super && c.granted >= law.Long {
		c.wait = law.Patience
	}
	switch {
	case intruding > most:
		if c.shape == super {
			c.wait = backoff.Next(c.wait, law.Patience, law.Long)
		}
		c.shape, c.calm = single, 0
	case c.shape == single && bulk && intruding < few:
		if c.calm += w.length; c.calm >= c.wait {
			c.shape, c.calm, c.granted = super, 0, 0
		}
	default:
		c.calm = 0
	}
	return c.shape
}

// nobody is the owner of a queue that does not serve exactly one isolated container.
const nobody = drop.Nobody

// queueWindow counts a queue's packets in some time.
type queueWindow struct {
	length time.Duration
	drop.Queue
}

// queueControl decides the owner of one queue. Make it with newQueueControl.
type queueControl struct {
	owner    uint32
	last     uint32        // the only receiver in the last window, or nobody
	calm     time.Duration // for which last has been the only receiver, at the rate least
	patience time.Duration // calm that a new owner needs; longer once an owner has lost the queue

	stale  uint64        // packets to unconfirmed addresses,
	within time.Duration // in this part of a second
}

func newQueueControl() queueControl {
	return queueControl{owner: nobody, last: nobody, patience: law.Patience}
}

// next counts one window and returns the owner from now on. least is the packet rate from which a
// queue is worth an owner. A receiver at the rate flood gets the queue after one window, before it
// takes much from others.
//
// The owner loses the queue with the first packet for another receiver, because that packet waits
// for the owner's share of the CPU. Each loss doubles the patience, which then holds for floods, too.
func (c *queueControl) next(w queueWindow, least, flood uint64) uint32 {
	if w.Others > 0 || c.unconfirmed(w) {
		// The first packets for a tenant that takes over an idle queue count as others', too. They
		// cost a window.
		if c.owner != nobody {
			c.owner = nobody
			c.patience = backoff.Next(c.patience, law.Patience, law.Long)
		}
		c.last, c.calm = w.Slot, 0
		return c.owner
	}
	if w.Own == 0 {
		return c.owner // without packets no other receiver waits
	}
	if w.Slot != c.last {
		c.last, c.calm = w.Slot, 0
	}
	arrived := func(rate uint64) bool { return float64(w.Own) >= float64(rate)*w.length.Seconds() }
	if arrived(least) {
		c.calm += w.length
	}
	if c.calm >= c.patience || arrived(flood) && c.patience == law.Patience {
		c.owner = c.last
	}
	return c.owner
}

// unconfirmed reports whether too many packets of this second went to addresses that may belong to
// another tenant by now.
func (c *queueControl) unconfirmed(w queueWindow) bool {
	if c.within >= time.Second {
		c.stale, c.within = 0, 0
	}
	c.stale += w.Stale
	c.within += w.length
	return c.stale > 2*ring
}
