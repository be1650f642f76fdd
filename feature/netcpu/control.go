package netcpu

import "time"

// A container's packets come in one of two shapes. As single packets they all
// go through its NAPI thread: that is what isolates. As super-packets (TSO left
// on at the host end) they take the ordinary softirq: bulk TCP is then three
// times faster and costs so little for each byte that it disturbs hardly
// anybody, but nothing is isolated. README.md has the measurement.
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

// patience is how many windows in a row have to speak for super-packets. One
// is enough for the way back, as that is the side of safety.
const patience = 3

// window is what came for a container in some time.
type window struct {
	length       time.Duration
	small, super uint64 // packets
}

// control chooses the shape of one container. The zero value is single.
type control struct {
	shape shape
	calm  int // windows in a row that spoke for super
}

// next takes one window into account and returns the shape from now on.
func (c *control) next(w window) shape {
	if w.length <= 0 {
		return c.shape
	}
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	small, supers := perSecond(w.small), perSecond(w.super)
	switch {
	case small > smallMax:
		c.shape, c.calm = single, 0
	case c.shape == single && small < smallLow && supers >= superMin:
		if c.calm++; c.calm >= patience {
			c.shape, c.calm = super, 0
		}
	default:
		c.calm = 0
	}
	return c.shape
}
