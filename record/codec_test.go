package record

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
)

// fill sets every field of a value at random, with lists of up to three elements. Floats are what a
// recording keeps in full.
func fill(r *rand.Rand, v reflect.Value) {
	switch {
	case v.Type() == reflect.TypeFor[time.Time]():
		if r.IntN(4) > 0 {
			v.Set(reflect.ValueOf(epoch.Add(time.Duration(r.Int64N(1e15) - 5e14))))
		}
	case v.Kind() == reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case v.Kind() == reflect.Int:
		v.SetInt(r.Int64N(2000) - 1000)
	case v.Kind() == reflect.Uint64:
		v.SetUint(r.Uint64() >> r.IntN(64))
	case v.Kind() == reflect.Float64:
		v.SetFloat([]float64{0, 0.25, -1e-9, float64(r.IntN(1e9)) / 1e9, 1e7, math.MaxFloat64, math.Inf(-1)}[r.IntN(7)])
	case v.Kind() == reflect.String:
		v.SetString([]string{"", "a", "naïve\x00\x1b[2J", "egress", "ingress", "b c"}[r.IntN(6)])
	case v.Kind() == reflect.Map:
		m := map[string]string{}
		for range r.IntN(3) {
			m[string(rune('a'+r.IntN(5)))] = "v"
		}
		v.Set(reflect.ValueOf(m))
	case v.Kind() == reflect.Pointer:
		if r.IntN(3) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem())
		}
	case v.Kind() == reflect.Slice:
		if r.IntN(6) > 0 {
			v.Set(reflect.MakeSlice(v.Type(), r.IntN(4), 4))
		}
		for i := range v.Len() {
			fill(r, v.Index(i))
		}
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(r, v.Field(i))
		}
	}
}

// change sets some fields anew, and leaves memory of the value before as it was.
func change(r *rand.Rand, v reflect.Value) {
	switch {
	case r.IntN(3) == 0:
	case v.Kind() == reflect.Slice && v.Len() > 0 && r.IntN(8) > 0:
		was := v.Len()
		next := reflect.MakeSlice(v.Type(), was, was)
		from := r.IntN(2) // also in another order
		for i := range was {
			next.Index(i).Set(v.Index((i + from) % was))
			change(r, next.Index(i))
		}
		v.Set(next)
	case v.Kind() == reflect.Pointer && !v.IsNil() && r.IntN(8) > 0:
		next := reflect.New(v.Type().Elem())
		next.Elem().Set(v.Elem())
		change(r, next.Elem())
		v.Set(next)
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]():
		for i := range v.NumField() {
			change(r, v.Field(i))
		}
	default:
		v.SetZero()
		fill(r, v)
	}
}

func ourDecoder(t testing.TB) *decoder {
	t.Helper()
	s, _, err := frameShape()
	if err != nil {
		t.Fatal(err)
	}
	return &decoder{shape: s}
}

// TestCodec writes and reads frames in which everything changes, some things, and nothing.
func TestCodec(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 20 {
		e, d := encoder{shape: ourDecoder(t).shape}, ourDecoder(t)
		var f api.Frame
		fill(r, reflect.ValueOf(&f).Elem())
		for i := range 15 {
			if i%5 != 4 {
				change(r, reflect.ValueOf(&f).Elem())
			}
			delta := e.encode(f, i%7 == 0)
			if i%5 == 4 && i%7 != 0 && len(delta) != 0 {
				t.Errorf("a frame that is the same has %d bytes", len(delta))
			}
			got, err := d.decode(delta, i%7 == 0)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(f, got); diff != "" {
				t.Fatalf("frame %d (-written +read):\n%s", i, diff)
			}
		}
	}
}

// TestCodecKeepsFrames checks that reading on does not change a frame that was read.
func TestCodecKeepsFrames(t *testing.T) {
	h := newHost(5)
	e, d := encoder{shape: ourDecoder(t).shape}, ourDecoder(t)
	var want, got []api.Frame
	for i := range 5 {
		f := h.next(time.Second)
		want = append(want, f)
		read, err := d.decode(e.encode(f, i == 0), i == 0)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, read)
	}
	if diff := cmp.Diff(want, got, nine()); diff != "" {
		t.Error(diff)
	}
}

// nine compares floats as a recording keeps them: to nine decimal places.
func nine() cmp.Option {
	return cmp.Comparer(func(a, b float64) bool { return a == b || math.Abs(a-b) <= 0.51e-9 })
}

func BenchmarkEncode(b *testing.B) {
	h := newHost(60)
	var frames []api.Frame
	for range 100 {
		frames = append(frames, h.next(5*time.Second))
	}
	bl, err := newBlocks()
	if err != nil {
		b.Fatal(err)
	}
	if _, err := bl.frame(frames[0], true, true); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(len(bl.out)), "key-B")
	var raw, out int
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f := frames[i%100]
		if _, err := bl.frame(f, false, i%100 == 0); err != nil {
			b.Fatal(err)
		}
		if i%100 > 0 {
			raw, out = len(bl.buf), len(bl.out)
		}
	}
	b.ReportMetric(float64(raw), "raw-B/frame")
	b.ReportMetric(float64(out), "B/frame")
}
