// Package hist holds the log-linear histograms of durations that BPF programs fill by bpf/hist.h
// and load generators fill themselves: arithmetic, quantiles, and the forms for Prometheus and the
// API. It measures nothing and knows no feature; features, package metrics and the benchmarks use
// it.
package hist

import (
	"math"
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
func (h *Histogram) Count() uint64 { return h.Below(64) }

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
	i := 0
	for ; rank >= h.Counts[i]; i++ {
		rank -= h.Counts[i]
	}
	return time.Duration(h.middle(i))
}

// Classic is a classic histogram of Prometheus, and the JSON form, in seconds.
type Classic struct {
	Buckets []Bound `json:"buckets"` // by Le
	Count   uint64  `json:"count"`   // of all, also above the last bound
	Sum     float64 `json:"sum"`
}

// Bound counts all durations up to a bound.
type Bound struct {
	Le    float64 `json:"le"`
	Count uint64  `json:"count"`
}

// Classic returns the form with a bound at 2^first ns and at each doubling up to 2^last ns: a
// series for each bucket would be too many. first is at least Sub.
func (h *Histogram) Classic(first, last int) *Classic {
	c := &Classic{Count: h.Count(), Sum: h.Seconds()}
	for exp := first; exp <= last; exp++ {
		c.Buckets = append(c.Buckets, Bound{Le: time.Duration(1 << exp).Seconds(), Count: h.Below(exp)})
	}
	return c
}

// Native is a native histogram of Prometheus, in seconds, as prometheus.NewConstNativeHistogram
// takes it: a bucket k ends at 2^(k/2^Schema) s.
type Native struct {
	Count    uint64
	Sum      float64
	Zero     uint64 // durations of 0
	Positive map[int]int64
	Schema   int32
}

// Native returns the form with equally many buckets in each power of two. They begin elsewhere, so
// each of ours is counted as its middle.
func (h *Histogram) Native() *Native {
	const finest = 8 // the highest schema
	schema := min(h.Sub, finest)
	n := &Native{Count: h.Count(), Sum: h.Seconds(), Positive: make(map[int]int64), Schema: int32(schema)}
	for i, c := range h.Counts {
		switch ns := h.middle(i); {
		case c == 0:
		case ns == 0:
			n.Zero = c
		default:
			k := math.Ceil(math.Ldexp(math.Log2(float64(ns)/float64(time.Second)), schema))
			n.Positive[int(k)] += int64(c)
		}
	}
	return n
}

// Forms is a histogram in both of the forms that Prometheus has: a scrape gets the native one too
// if it asks for it.
type Forms struct {
	Classic *Classic
	Native  *Native
}

// Forms returns both; first and last are the bounds of Classic.
func (h *Histogram) Forms(first, last int) *Forms {
	return &Forms{Classic: h.Classic(first, last), Native: h.Native()}
}
