package isolate

import (
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
)

// A container's packets come in one of two shapes. As single packets they all
// go through its NAPI thread: that is what isolates. As super-packets (TSO left
// on at the host end) they take the ordinary softirq: bulk TCP is then three
// times faster and costs so little for each byte that it disturbs hardly
// anybody, but nothing is isolated. MEASURED.md has the measurement.
type shape int

const (
	single shape = iota
	super
)

// The bounds between the shapes, in packets per second. What does not come in
// super-packets is what hurts: at smallMax it costs its neighbours some 3 % of a
// core if it is not isolated. There is a gap between the bounds, so that a
// container near one of them does not swing.
const (
	smallMax = 20_000 // more single packets than this: they must be isolated
	smallLow = 5_000  // fewer than this, and enough super-packets: let these be
	superMin = 2_000  // super-packets worth the change: about 0.3 Gbit/s and up
)

// How many windows in a row have to speak for super-packets. One is enough for
// the way back, as that is the side of safety. Whoever floods soon after it got
// them waits twice as long the next time: else a second of flood every few would
// be isolated never.
const (
	patience = 3
	longest  = 60 // what that grows to
	forget   = 60 // windows with super-packets after which it is short again
)

// window is what came for a container in some time.
type window struct {
	length       time.Duration
	small, super uint64 // packets
}

// control chooses the shape of one container. The zero value is single.
type control struct {
	shape   shape
	calm    int // windows in a row that spoke for super
	wait    int // how many there have to be; 0: patience
	granted int // windows with super-packets since they were last chosen
}

// next takes one window into account and returns the shape from now on.
func (c *control) next(w window) shape {
	if w.length <= 0 {
		return c.shape
	}
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	small, supers := perSecond(w.small), perSecond(w.super)
	if c.wait == 0 {
		c.wait = patience
	}
	if c.shape == super {
		if c.granted++; c.granted >= forget {
			c.wait = patience
		}
	}
	switch {
	case small > smallMax && c.shape == super:
		c.wait = min(2*c.wait, longest)
		c.shape, c.calm = single, 0
	case small > smallMax:
		c.calm = 0
	case c.shape == single && small < smallLow && supers >= superMin:
		if c.calm++; c.calm >= c.wait {
			c.shape, c.calm, c.granted = super, 0, 0
		}
	default:
		c.calm = 0
	}
	return c.shape
}

// The rules by which a receive queue of an uplink is given to a container.
const (
	queueMin      = 1_000 // packets per second that make it worth while
	queuePatience = 3     // windows in a row in which all packets are the container's
	queueLongest  = 60    // what that grows to for a queue that others keep using
	queueStale    = 512   // packets after a pause until the address is known again: two rings
)

// nobody is the owner of a queue that brings no isolated container's packets alone.
const nobody = drop.Nobody

// queueWindow is what came by a queue in some time.
type queueWindow struct {
	length time.Duration
	drop.Queue
}

// queueControl decides to whom one queue belongs. Make it with newQueueControl.
type queueControl struct {
	owner    uint32
	last     uint32 // whose all packets were in the last window, or nobody
	calm     int    // how many windows that has been so
	patience int
}

func newQueueControl() queueControl {
	return queueControl{owner: nobody, last: nobody, patience: queuePatience}
}

// next takes one window into account and returns the owner from now on. Least is how
// many packets per second make the queue worth giving. It is lost with the first
// packet that is somebody else's, since that one waits for the owner's share of the
// CPU; and each loss doubles the patience.
func (c *queueControl) next(w queueWindow, least uint64) uint32 {
	if w.Others > 0 || w.Stale > queueStale {
		// The first packets of a tenant that takes over an idle queue are such,
		// too: they cost a window.
		if c.owner != nobody {
			c.owner = nobody
			c.patience = min(2*c.patience, queueLongest)
		}
		c.last, c.calm = w.Slot, 0
		return c.owner
	}
	if w.Own == 0 {
		return c.owner // nothing came: nobody is kept waiting
	}
	if w.Slot != c.last {
		c.last, c.calm = w.Slot, 0
	}
	if float64(w.Own) >= float64(least)*w.length.Seconds() {
		c.calm++
	}
	if c.calm >= c.patience {
		c.owner = c.last
	}
	return c.owner
}
