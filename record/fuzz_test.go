package record

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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

// TestCodec writes and reads frames of which every field is set, and none.
func TestCodec(t *testing.T) {
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	f, _ := filled()
	want := []api.Frame{f, {}, f}
	for _, f := range want {
		write(t, w, f)
	}
	got, errs := read(t, dir, time.Time{}, time.Time{})
	if diff := cmp.Diff(want, got); diff != "" || errs != nil {
		t.Errorf("errors %v, frames (-written +read):\n%s", errs, diff)
	}
}
