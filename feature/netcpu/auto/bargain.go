package auto

import (
	"fmt"
	"time"
)

// The rules that end an isolation which costs its container more than others gain.
const (
	dearFor    = 3                // windows in a row
	dearLeast  = 0.01             // of a CPU: less is noise
	dearForget = 10 * time.Minute // how long the cost is remembered
)

// bargain compares the cost of isolating a container, to the container, with the gain of others.
// Both are per byte of its packets: a request and its answer have the same bytes in each mode,
// while super-packets become many single ones. The zero value knows nothing, and objects to
// nothing.
type bargain struct {
	robs  float64 // ns that others lost for each byte, before it was isolated
	costs float64 // ns that all its packets cost for each byte then

	spared, extra time.Duration // of the last window in which it was isolated: the gain and the cost
	dear          int           // consecutive windows in which the cost was higher

	price float64       // ns per byte of the last isolation that cost too much; 0: none did
	since time.Duration // when that was
}

// before records a window in which the container begins to be isolated.
func (b *bargain) before(e evidence) {
	*b = bargain{price: b.price, since: b.since}
	if e.bytes > 0 {
		b.robs = float64(e.robbed()) / float64(e.bytes)
		b.costs = float64(e.network) / float64(e.bytes)
	}
}

// within records a window in which the container is isolated, and reports whether that has become a
// bad bargain.
func (b *bargain) within(e evidence) (bad bool) {
	if b.robs == 0 {
		return false // an earlier agent isolated it
	}
	b.spared = time.Duration(b.robs * float64(e.bytes))
	b.extra = max(0, e.whole()-time.Duration(b.costs*float64(e.bytes)))
	if b.extra <= b.spared || share(b.extra, e.length) < dearLeast {
		b.dear = 0
		return false
	}
	if b.dear++; b.dear < dearFor {
		return false
	}
	b.price, b.since = float64(b.extra)/float64(e.bytes+1), 0
	return true
}

// worth reports whether isolating the container now promises others more than it costs, as far as
// is known.
func (b *bargain) worth(e evidence) bool {
	if b.price > 0 {
		if b.since += e.length; b.since >= dearForget {
			b.price = 0
		}
	}
	return float64(e.robbed()) > b.price*float64(e.bytes)
}

// text describes the last window.
func (b *bargain) text(length time.Duration) string {
	return fmt.Sprintf("isolation cost it %s of a CPU and spared others %s", percent(b.extra, length), percent(b.spared, length))
}
