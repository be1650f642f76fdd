// Package hist holds the log-linear histograms of durations that BPF programs fill by bpf/hist.h
// and load generators fill themselves: arithmetic, quantiles, and the forms for Prometheus and the
// API. It measures nothing and knows no feature; features, package metrics and the benchmarks use
// it.
package hist

import (
	"math/bits"
	"time"
)

// Histogram counts durations. Each power of two of nanoseconds is divided into 1<<Sub buckets of
// equal width, so that a bucket is no wider than 1/(1<<Sub) of any duration in it, and durations
// below 2<<Sub ns are exact.
type Histogram struct {
	Sub    int
	Counts []uint64 // by bucket; the last also counts all that is longer
	Sum    uint64   // of all durations, in ns; 0 if it is not known
}

// New makes an empty Histogram whose last bucket ends at 2^top ns.
func New(sub, top int) *Histogram {
	return &Histogram{Sub: sub, Counts: make([]uint64, (top-sub+1)<<sub)}
}

// Bucket returns the index of the bucket for a duration among a number of buckets.
func Bucket(ns uint64, sub, buckets int) int {
	exp := max(bits.Len64(ns)-1-sub, 0) // ns>>exp is below 2<<sub
	return min(exp<<sub+int(ns>>exp), buckets-1)
}

// bucket returns the start and the width of a bucket, in ns.
func (h *Histogram) bucket(i int) (from, width uint64) {
	exp := max(i>>h.Sub-1, 0)
	return uint64(i-exp<<h.Sub) << exp, 1 << exp
}

// middle returns the duration, in ns, that stands for all of a bucket: it is within 1/(2<<Sub) of
// each.
func (h *Histogram) middle(i int) uint64 {
	from, width := h.bucket(i)
	return from + width/2
}

// Count returns the number of durations.
func (h *Histogram) Count() (n uint64) {
	for _, c := range h.Counts {
		n += c
	}
	return n
}

// Seconds returns the sum of all durations. A time.Duration would overflow: a thousand packets that
// always wait add up to its 292 years within four months.
func (h *Histogram) Seconds() float64 { return float64(h.Sum) / float64(time.Second) }

// Below counts the durations of less than 2^exp ns. exp is at least Sub.
func (h *Histogram) Below(exp int) (n uint64) {
	for _, c := range h.Counts[:min((exp-h.Sub+1)<<h.Sub, len(h.Counts))] {
		n += c
	}
	return n
}

// Add adds another Histogram with the same buckets, such as that of another CPU.
func (h *Histogram) Add(other *Histogram) {
	for i, c := range other.Counts {
		h.Counts[i] += c
	}
	h.Sum += other.Sum
}

// Since returns what was counted after an earlier state of the same Histogram, and h itself if h
// was reset in between.
func (h *Histogram) Since(earlier *Histogram) *Histogram {
	d := &Histogram{Sub: h.Sub, Counts: make([]uint64, len(h.Counts)), Sum: h.Sum - earlier.Sum}
	for i, c := range h.Counts {
		if c < earlier.Counts[i] {
			return h
		}
		d.Counts[i] = c - earlier.Counts[i]
	}
	return d
}

// Quantile returns the duration that a part q, from 0 to 1, of all durations did not exceed, to
// within 1/(2<<Sub) of it; 0 if there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Count()
	if total == 0 {
		return 0
	}
	rank := total - 1
	if q < 1 { // a float64 is not exact above 2^53
		rank = min(rank, uint64(max(q, 0)*float64(rank)))
	}
	last := 0
	for i, n := range h.Counts {
		if n == 0 {
			continue
		}
		if last = i; rank < n {
			break
		}
		rank -= n
	}
	return time.Duration(h.middle(last))
}
