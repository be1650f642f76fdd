package delay

import (
	"testing"
	"time"
)

// TestQuantile has each bucket's middle within 1/16 of all that it takes, and
// the buckets follow one another without a gap.
func TestQuantile(t *testing.T) {
	next := time.Duration(0)
	for i := range buckets {
		var h Histogram
		h[i] = 1
		got := h.Quantile(0.5)
		exp := max(i/sub-1, 0)
		first, width := time.Duration(i-exp*sub)<<exp, time.Duration(1)<<exp
		if first != next || got < first || got >= first+width || width > 1 && float64(width)/2 > float64(first)/16 {
			t.Errorf("bucket %d from %d, %d wide, has the middle %d; want it from %d", i, first, width, got, next)
		}
		next = first + width
	}
	if next != 1<<topBits {
		t.Errorf("they end at %d", next)
	}
	var h Histogram
	if h.Quantile(0.5) != 0 || h.Packets() != 0 {
		t.Error("nothing waited, and yet")
	}
	h[3], h[5], h[7] = 90, 9, 1
	for q, want := range map[float64]time.Duration{0: 3, 0.5: 3, 0.89: 3, 0.95: 5, 0.98: 5, 1: 7} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
}
