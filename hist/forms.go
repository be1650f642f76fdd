package hist

import (
	"math"
	"time"
)

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
