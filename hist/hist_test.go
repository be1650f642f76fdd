package hist

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"pgregory.net/rapid"
)

// layouts returns those of BPF programs and load generators, and the extremes.
func layouts() [][2]int { return [][2]int{{3, 36}, {4, 40}, {0, 1}, {5, 63}} }

// TestBuckets checks that buckets follow one another without a gap, up to the last.
func TestBuckets(t *testing.T) {
	for _, l := range layouts() {
		sub, top := l[0], l[1]
		h := New(sub, top)
		next := uint64(0)
		for i := range h.Counts {
			from, width := h.bucket(i)
			if from != next {
				t.Fatalf("%v: bucket %d begins at %d, want %d", l, i, from, next)
			}
			next = from + width
			for _, ns := range []uint64{from, h.middle(i), next - 1} {
				if got := Bucket(ns, sub, len(h.Counts)); got != i {
					t.Fatalf("%v: %d ns is counted in bucket %d, want %d", l, ns, got, i)
				}
			}
		}
		if next != 1<<top {
			t.Errorf("%v: the last bucket ends at %d", l, next)
		}
	}
}

// FuzzBucket checks that any duration has a bucket, and how far its middle is off.
func FuzzBucket(f *testing.F) {
	for _, ns := range []uint64{0, 1, 7, 8, 15, 16, 1<<36 - 1, 1 << 36, 1 << 63, math.MaxUint64} {
		f.Add(ns, uint8(3), uint8(36))
		f.Add(ns, uint8(4), uint8(40))
	}
	f.Fuzz(func(t *testing.T, ns uint64, s, width uint8) {
		sub := int(s % 8)
		top := sub + 1 + int(width)%(63-sub)
		h := New(sub, top)
		i := Bucket(ns, sub, len(h.Counts))
		if i < 0 || i >= len(h.Counts) {
			t.Fatalf("%d ns: bucket %d of %d", ns, i, len(h.Counts))
		}
		if ns >= 1<<top {
			if i != len(h.Counts)-1 {
				t.Errorf("%d ns: bucket %d of %d, want the last", ns, i, len(h.Counts))
			}
			return
		}
		from, width64 := h.bucket(i)
		if ns < from || ns >= from+width64 {
			t.Errorf("%d ns: bucket from %d to %d", ns, from, from+width64)
		}
		if off := math.Abs(float64(h.middle(i)) - float64(ns)); off*float64(uint64(2)<<sub) > float64(ns) {
			t.Errorf("%d ns: the middle of its bucket is %d", ns, h.middle(i))
		}
	})
}

// drawn returns some durations below 2^top ns.
func drawn(t *rapid.T, name string, top int) []uint64 {
	bits := rapid.IntRange(0, top)
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) uint64 {
		return rapid.Uint64Range(0, 1<<bits.Draw(t, "bits")-1).Draw(t, "ns")
	}), 0, 50).Draw(t, name)
}

func of(sub, top int, durations ...uint64) *Histogram {
	h := New(sub, top)
	for _, ns := range durations {
		h.Counts[Bucket(ns, sub, len(h.Counts))]++
		h.Sum += ns
	}
	return h
}

func sum(hs ...*Histogram) *Histogram {
	s := &Histogram{Sub: hs[0].Sub, Counts: make([]uint64, len(hs[0].Counts))}
	for _, h := range hs {
		s.Add(h)
	}
	return s
}

// TestAdd checks that histograms add up in any order, and that Since undoes Add.
func TestAdd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const sub, top = 3, 36
		x, y, z := drawn(t, "x", top), drawn(t, "y", top), drawn(t, "z", top)
		a, b, c := of(sub, top, x...), of(sub, top, y...), of(sub, top, z...)
		all := of(sub, top, slices.Concat(x, y, z)...)
		for _, got := range []*Histogram{sum(sum(a, b), c), sum(a, sum(b, c)), sum(c, b, a)} {
			if !reflect.DeepEqual(got, all) {
				t.Fatalf("added: %+v, counted in one: %+v", got, all)
			}
		}
		if got := sum(a, b).Since(a); !reflect.DeepEqual(got, b) {
			t.Fatalf("%+v came, Since gives %+v", b, got)
		}
	})
}

// TestQuantile compares quantiles with those of the sorted durations.
func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := rapid.SampledFrom([][2]int{{3, 36}, {4, 40}}).Draw(t, "layout")
		durations := drawn(t, "durations", l[1])
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		got := float64(of(l[0], l[1], durations...).Quantile(q))
		if len(durations) == 0 {
			if got != 0 {
				t.Fatalf("there are none, and yet %v", got)
			}
			return
		}
		slices.Sort(durations)
		want := float64(durations[int(q*float64(len(durations)-1))])
		if math.Abs(got-want)*float64(int(2)<<l[0]) > want {
			t.Fatalf("quantile %v is %v, want %v", q, got, want)
		}
	})
	h := New(3, 36)
	h.Counts[3], h.Counts[5], h.Counts[7] = 90, 9, 1
	for q, want := range map[float64]time.Duration{-1: 3, 0: 3, 0.5: 3, 0.89: 3, 0.95: 5, 0.98: 5, 1: 7, 2: 7} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
	h.Counts[3], h.Counts[5] = math.MaxUint64-1, 0 // a float64 has no such rank
	for q, want := range map[float64]time.Duration{math.Nextafter(1, 0): 3, 1: 7} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %v of 2^64-1 durations is %d, want %d", q, got, want)
		}
	}
}

func TestSince(t *testing.T) {
	before, after := of(3, 36, 4, 4, 9), of(3, 36, 4, 4, 9, 4, 20, 20)
	if d := after.Since(before); !reflect.DeepEqual(d, of(3, 36, 4, 20, 20)) {
		t.Errorf("%+v", d)
	}
	if d := before.Since(after); d != before {
		t.Errorf("it was reset, and %+v came", d)
	}
	if !reflect.DeepEqual(after, of(3, 36, 4, 4, 9, 4, 20, 20)) {
		t.Error("Since changes what it is given")
	}
}

// written returns a metric as Prometheus scrapes it.
func written(t *rapid.T, m prometheus.Metric, err error) *dto.Histogram {
	if err != nil {
		t.Fatal(err)
	}
	var out dto.Metric
	if err := m.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.GetHistogram()
}

// TestPrometheus passes both forms to the client library, and reads quantiles from the result.
func TestPrometheus(t *testing.T) {
	desc := prometheus.NewDesc("wait_seconds", "", nil, nil)
	rapid.Check(t, func(t *rapid.T) {
		const first, last = 10, 34
		durations := drawn(t, "durations", 36)
		h := of(3, 36, durations...)

		c := h.Classic(first, last)
		les := make(map[float64]uint64)
		for i, b := range c.Buckets {
			les[b.Le] = b.Count
			want := uint64(0)
			for _, ns := range durations {
				if ns < 1<<(first+i) {
					want++
				}
			}
			if b.Le != float64(uint64(1)<<(first+i))/1e9 || b.Count != want {
				t.Fatalf("bound %v has %d, want %d", b.Le, b.Count, want)
			}
		}
		m, err := prometheus.NewConstHistogram(desc, c.Count, c.Sum, les)
		if got := written(t, m, err); got.GetSampleCount() != uint64(len(durations)) || len(got.Bucket) != last-first+1 {
			t.Fatalf("classic: %v", got)
		}

		n := h.Native()
		m, err = prometheus.NewConstNativeHistogram(desc, n.Count, n.Sum, n.Positive, nil, n.Zero, n.Schema, prometheus.DefNativeHistogramZeroThreshold, time.Time{})
		got := written(t, m, err)
		if got.GetSampleCount() != uint64(len(durations)) || got.GetSchema() != 3 {
			t.Fatalf("native: %v", got)
		}
		for k, count := range n.Positive {
			lo, hi := math.Exp2(float64(k-1)/8), math.Exp2(float64(k)/8)
			// A duration is within 1/16 of the middle of its bucket.
			near := 0
			for _, ns := range durations {
				if s := float64(ns) / 1e9; s*17/16 >= lo && s*15/16 <= hi {
					near++
				}
			}
			if int(count) > near {
				t.Fatalf("native: %d from %v to %v s, where %d are", count, lo, hi, near)
			}
		}
	})
}

func TestJSON(t *testing.T) {
	data, err := json.Marshal(of(3, 36, 0, 20, 20, 1<<35).Classic(4, 6))
	const want = `{"buckets":[{"le":1.6e-8,"count":1},{"le":3.2e-8,"count":3},{"le":6.4e-8,"count":3}],"count":4,"sum":34.359738408}`
	if err != nil || string(data) != want {
		t.Errorf("%s, %v", data, err)
	}
}
