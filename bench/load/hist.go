package load

import (
	"math/bits"
	"time"
)

// Latencies are counted in buckets that are exact up to 16 ns and 1/16 of the
// value wide above, up to 2^40 ns (18 minutes).
const (
	sub     = 16 // buckets in each power of two
	subBits = 4
	topBits = 40
	buckets = (topBits - subBits + 1) * sub
)

// Histogram counts latencies by bucket.
type Histogram [buckets]uint64

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

// Since gives what was counted from an earlier state of the histogram on.
func (h *Histogram) Since(earlier *Histogram) *Histogram {
	d := new(Histogram)
	for i := range d {
		d[i] = h[i] - earlier[i]
	}
	return d
}

// Count is how many there are.
func (h *Histogram) Count() (n uint64) {
	for _, c := range h {
		n += c
	}
	return n
}

// Quantile gives the q-quantile, q from 0 to 1, to within 1/16 of its value; 0
// if there is nothing.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Count()
	if total == 0 {
		return 0
	}
	rank := uint64(q * float64(total-1))
	for i, n := range h {
		if rank < n {
			return time.Duration(middle(i))
		}
		rank -= n
	}
	return 0 // not reached: the ranks end below total
}
