package record

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead-project/fairlead/api"
)

// fill sets every field of a value at random, with lists of up to three elements.
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
		v.SetFloat([]float64{0, 0.25, -1e-9, r.Float64(), 1e7, math.MaxFloat64}[r.IntN(6)])
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

// TestCodec writes and reads frames with anything in them.
func TestCodec(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	var want []api.Frame
	for range 64 {
		var f api.Frame
		fill(r, reflect.ValueOf(&f).Elem())
		write(t, w, f)
		want = append(want, f)
	}
	got, errs := read(t, dir, time.Time{}, time.Time{})
	// What has no elements is left out.
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || errs != nil {
		t.Errorf("errors %v, frames (-written +read):\n%s", errs, diff)
	}
}

func BenchmarkFrame(b *testing.B) {
	h := newHost(60)
	var frames []api.Frame
	for range 100 {
		frames = append(frames, h.next(5*time.Second))
	}
	var bl blocks
	all, n := 0, 0
	b.ReportAllocs()
	for b.Loop() {
		data, err := bl.frame(frames[n%100], n == 0)
		must(b, err)
		all, n = all+len(data), n+1
	}
	b.ReportMetric(float64(all)/float64(n), "B/frame")
}

func BenchmarkParse(b *testing.B) {
	h := newHost(60)
	text, err := json.Marshal(h.next(5 * time.Second))
	must(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseFrame(text); err != nil {
			b.Fatal(err)
		}
	}
}
