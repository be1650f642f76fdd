package load

import "math/bits"

// Latencies are counted in buckets that are exact up to 16 ns and 1/16 of the
// value wide above, up to 2^40 ns (18 minutes).
const (
	sub     = 16 // buckets in each power of two
	subBits = 4
	topBits = 40
	buckets = (topBits - subBits + 1) * sub
)

func bucket(ns uint64) int {
	if ns < sub {
		return int(ns)
	}
	exp := bits.Len64(ns) - 1 - subBits // so that ns>>exp is in [16, 32)
	return min(exp*sub+int(ns>>exp), buckets-1)
}

// middle is the value that stands for all of a bucket.
func middle(i int) uint64 {
	if i < sub {
		return uint64(i)
	}
	exp := i/sub - 1
	return uint64(i%sub+sub)<<exp + (1<<exp)/2
}
