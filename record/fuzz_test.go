package record

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead-project/fairlead/api"
)

// sample returns the bytes of a small recording.
func sample(t testing.TB) []byte {
	t.Helper()
	var b blocks
	h := newHost(5)
	var all []byte
	for i := range 3 {
		data, err := b.frame(h.next(time.Second), i == 0)
		must(t, err)
		all = append(all, data...)
	}
	return all
}

// FuzzFile reads a file of any content: without a panic, and with errors that say what it is.
func FuzzFile(f *testing.F) {
	whole := sample(f)
	f.Add(whole, false)
	f.Add(whole[:len(whole)/2], true)
	for _, at := range []int{25, 40, len(whole) / 3, len(whole) - 9} {
		flipped := bytes.Clone(whole)
		flipped[at] ^= 0x41
		f.Add(flipped, true)
	}
	f.Fuzz(func(t *testing.T, data []byte, mend bool) {
		if mend {
			checksums(data)
		}
		path := filepath.Join(t.TempDir(), "f")
		must(t, os.WriteFile(path, data, 0o600))
		r, err := Open(path)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		if _, err := r.Stat(); err != nil {
			t.Error(err)
		}
		for _, err := range r.Frames(t.Context(), time.Time{}, time.Time{}, 0) {
			if err != nil && !errors.Is(err, ErrDamaged) {
				t.Error(err)
			}
		}
	})
}

// checksums makes the checksum of each block right, so that what is behind it is reached.
func checksums(data []byte) {
	for at := len(magic); at+headSize <= len(data); {
		b, ok := parseHead(data[at:], int64(at))
		if !ok || b.end() > int64(len(data)) {
			return
		}
		sum := crc32.Checksum(data[at+8:b.end()], crc32.MakeTable(crc32.Castagnoli))
		binary.LittleEndian.PutUint32(data[at+4:], sum)
		at = int(b.end())
	}
}

// allocated returns how many bytes a call has allocated.
func allocated(call func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	call()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestHostileSizes reads what claims to be small and is not.
func TestHostileSizes(t *testing.T) {
	elements := maxRaw/3 - 10
	for name, text := range map[string]string{
		"empty elements": `{"containers":[{}` + strings.Repeat(",{}", elements) + `]}`,
		"no elements":    `{"containers":[null` + strings.Repeat(",null", elements/2) + `]}`,
		"depth":          `{"containers":` + strings.Repeat("[", elements),
	} {
		took := allocated(func() {
			if _, err := parseFrame([]byte(text)); !errors.Is(err, ErrDamaged) {
				t.Errorf("%s: %v", name, err)
			}
		})
		if took > 2*maxMemory {
			t.Errorf("%s took %d bytes", name, took)
		}
	}
	if size := reflect.TypeFor[api.Container]().Size(); size > elementSize {
		t.Errorf("a container takes %d bytes", size)
	}
	// A block that unpacks to more than it says.
	bomb := sample(t)
	binary.LittleEndian.PutUint32(bomb[len(magic)+12:], 100)
	checksums(bomb)
	path := filepath.Join(t.TempDir(), "bomb")
	must(t, os.WriteFile(path, bomb, 0o600))
	if got, errs := read(t, path, time.Time{}, time.Time{}); len(got) != 0 || len(errs) != 1 || !errors.Is(errs[0], ErrDamaged) {
		t.Errorf("%d frames, errors %v", len(got), errs)
	}
}

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
