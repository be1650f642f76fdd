package isolate

import (
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// A container's packets come in one of two shapes. Single packets all pass its NAPI thread: that
// isolates. With super-packets (TSO left on at the host end) all take the ordinary softirq: bulk TCP
// is then three times faster and costs so little per byte that it hardly disturbs others, but nothing
// is isolated (docs/decisions/0002-shape-follows-traffic.md).
//
// Single packets that the softirq handles in their sender's time, in the container's own or on an
// idle CPU harm nobody. Only the others, the intruding ones, need isolation.
type shape int

const (
	single shape = iota
	super
)

// window is a container's packet counts in some time.
type window struct {
	length    time.Duration
	intruding uint64 // single packets that take time from others
	super     uint64 // super-packets
}

// control chooses the shape of one container. One window is enough for single, the safe side. A
// container that floods soon after it got super-packets waits twice as long the next time: else a second
// of flood every few seconds would never be isolated. The zero value is single.
type control struct {
	shape   shape
	calm    time.Duration // how long traffic has asked for super
	wait    time.Duration // how long it has to; 0: law.Patience
	granted time.Duration // since super-packets were last chosen
}

// next counts one window and returns the shape from now on.
func (c *control) next(w window) shape {
	if w.length <= 0 {
		return c.shape
	}
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	// Bulk TCP is from about 0.3 Gbit/s on. Without it fewer single packets are isolated: nothing is lost.
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

// nobody is the owner of a queue that serves no single isolated container.
const nobody = drop.Nobody

// queueWindow is a queue's packet counts in some time.
type queueWindow struct {
	length time.Duration
	drop.Queue
}

// queueControl decides the owner of one queue. Make it with newQueueControl.
type queueControl struct {
	owner    uint32
	last     uint32        // the only receiver in the last window, or nobody
	calm     time.Duration // the time of such windows
	patience time.Duration // longer once an owner has lost it

	stale  uint64        // packets to an address that nobody confirms,
	within time.Duration // in the part of a second so far
}

func newQueueControl() queueControl {
	return queueControl{owner: nobody, last: nobody, patience: law.Patience}
}

// next counts one window and returns the owner from now on. least is the packet rate that makes the
// queue worth giving. A flood, of at least that rate, gets the queue after one window, before it
// takes much from others.
//
// The owner loses the queue with the first packet of another, which has to wait for the owner's
// share of the CPU; each loss doubles the patience, and a flood has to wait for that, too.
func (c *queueControl) next(w queueWindow, least, flood uint64) uint32 {
	if w.Others > 0 || c.unconfirmed(w) {
		// The same holds for the first packets of a tenant that takes over an idle queue: they cost
		// a window.
		if c.owner != nobody {
			c.owner = nobody
			c.patience = backoff.Next(c.patience, law.Patience, law.Long)
		}
		c.last, c.calm = w.Slot, 0
		return c.owner
	}
	if w.Own == 0 {
		return c.owner // no packets: no other waits
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

// unconfirmed reports whether too many packets of this second came to an address that may be
// another tenant's by now.
func (c *queueControl) unconfirmed(w queueWindow) bool {
	if c.within >= time.Second {
		c.stale, c.within = 0, 0
	}
	c.stale += w.Stale
	c.within += w.length
	return c.stale > 2*ring
}
