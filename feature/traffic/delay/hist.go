package delay

import "time"

// The buckets, as in delay.bpf.c: each is exact up to 2^4 ns and 1/8 of the
// value wide above. The last takes all from 2^36 ns (69 s) on.
const (
	subBits = 3
	sub     = 1 << subBits
	topBits = 36
	buckets = (topBits - subBits + 1) * sub
)

// Histogram counts packets by how long they waited.
type Histogram struct {
	sum   uint64 // ns
	count [buckets]uint64
}

// Packets is how many there are.
func (h *Histogram) Packets() (n uint64) {
	for _, c := range h.count {
		n += c
	}
	return n
}

// Seconds is how long all of them waited together. (A time.Duration is soon full:
// a thousand that wait all the time are 107 days of it.)
func (h *Histogram) Seconds() float64 { return float64(h.sum) / float64(time.Second) }

// Below is how many waited for less than 2^exp ns. exp is from 3 to 36.
func (h *Histogram) Below(exp int) (n uint64) {
	for _, c := range h.count[:(exp-subBits+1)*sub] {
		n += c
	}
	return n
}

// Since gives what has come to an earlier Histogram of the same class; all, if
// it has begun anew meanwhile.
func (h *Histogram) Since(earlier *Histogram) *Histogram {
	d := *h
	for i, c := range earlier.count {
		if c > d.count[i] {
			return h
		}
		d.count[i] -= c
	}
	d.sum -= earlier.sum
	return &d
}

// Quantile gives the delay that a part q of the packets, from 0 to 1, did not
// exceed, to within 1/16 of it; 0 if there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Packets()
	if total == 0 {
		return 0
	}
	rank := uint64(q * float64(total-1))
	for i, n := range h.count {
		if rank < n {
			return middle(i)
		}
		rank -= n
	}
	return 0 // not reached: the ranks end below total
}

// middle of what a bucket takes.
func middle(i int) time.Duration {
	if i < 2*sub {
		return time.Duration(i)
	}
	exp := i/sub - 1
	return time.Duration(i%sub+sub)<<exp + (1<<exp)/2
}
