package load

import "runtime"

// unit is the work that the victim counts, in rounds of xorshift64. Each round depends on the one
// before it, so a unit takes the same number of cycles everywhere: about 25 µs at 3 GHz.
const unit = 12500

func burn(_ options, b *Board) error {
	runtime.LockOSThread()
	b.setReady()
	x := uint64(88172645463325252)
	for x != 0 { // always: xorshift never reaches 0, but the compiler cannot know
		for range unit {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		b.count(1, 0)
	}
	return nil
}
