package auto

import (
	"fmt"
	"time"
)

// The rules by which an isolation that costs its container more than others gain ends.
const (
	dearFor    = 3                // windows in a row
	dearLeast  = 0.01             // of a CPU: less is not told from noise
	dearForget = 10 * time.Minute // for so long what it costs is remembered
)

// bargain weighs what isolating a container costs the container against what others gain.
// Both go by the bytes of its packets: a request and its answer have as many in each mode,
// while super-packets become many single ones. The zero value knows nothing, and objects
// to nothing.
type bargain struct {
	robs  float64 // ns that others lost for each byte, before it was isolated
	costs float64 // ns that all its packets cost for each byte then

	spared, extra time.Duration // of the last window in which it was isolated: the gain and the cost
	dear          int           // windows in a row in which the cost was more

	price float64       // ns for each byte that the last isolation cost in vain; 0: none did
	since time.Duration // then
}

// before takes over what a window shows in which the container begins to be isolated.
func (b *bargain) before(e evidence) {
	*b = bargain{price: b.price, since: b.since}
	if e.bytes > 0 {
		b.robs = float64(e.robbed()) / float64(e.bytes)
		b.costs = float64(e.network) / float64(e.bytes)
	}
}

// within takes a window into account in which the container is isolated, and says whether
// that is a bad bargain by now.
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

// worth says whether isolating the container now promises others more than it costs, as far
// as is known.
func (b *bargain) worth(e evidence) bool {
	if b.price > 0 {
		if b.since += e.length; b.since >= dearForget {
			b.price = 0
		}
	}
	return float64(e.robbed()) > b.price*float64(e.bytes)
}

// text says how the last window was.
func (b *bargain) text(length time.Duration) string {
	return fmt.Sprintf("isolation cost it %s of a CPU and spared others %s", percent(b.extra, length), percent(b.spared, length))
}
