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
		h.count[i] = 1
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
	h.count[3], h.count[5], h.count[7] = 90, 9, 1
	for q, want := range map[float64]time.Duration{0: 3, 0.5: 3, 0.89: 3, 0.95: 5, 0.98: 5, 1: 7} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
}

// TestBelow has the bounds of Below where those of buckets are.
func TestBelow(t *testing.T) {
	for exp := subBits; exp <= topBits; exp++ {
		for i := range buckets {
			var h Histogram
			h.count[i] = 1
			want := uint64(0)
			if h.Quantile(0.5) < 1<<exp {
				want = 1
			}
			if got := h.Below(exp); got != want {
				t.Errorf("of bucket %d, whose middle is %v, %d are below 2^%d ns", i, h.Quantile(0.5), got, exp)
			}
		}
	}
}

func TestSince(t *testing.T) {
	var before, after Histogram
	before.sum, before.count[4], before.count[9] = 400, 10, 1
	after.sum, after.count[4], after.count[9], after.count[20] = 1000, 12, 1, 5
	d := after.Since(&before)
	if d.Packets() != 7 || d.Seconds() != 600e-9 || d.count[4] != 2 || d.count[9] != 0 || d.count[20] != 5 {
		t.Errorf("%d packets, %v: %v", d.Packets(), d.Seconds(), d.count)
	}
	if d := before.Since(&after); *d != before {
		t.Errorf("it has begun anew, and %v came", d.count)
	}
	if after.count[4] != 12 || before.count[4] != 10 {
		t.Error("it changes what it is given")
	}
}
