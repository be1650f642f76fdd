package record

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// sample returns the bytes of a small recording.
func sample(t testing.TB) []byte {
	t.Helper()
	b, err := newBlocks()
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(2)
	var all []byte
	for i := range 3 {
		data, err := b.frame(h.next(time.Second), i == 0, false)
		if err != nil {
			t.Fatal(err)
		}
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
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
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
		for _, err := range r.Frames(time.Time{}, time.Time{}) {
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

// FuzzDelta decodes deltas of any content, one after the other: a frame takes no more memory than it
// may.
func FuzzDelta(f *testing.F) {
	e := encoder{shape: ourDecoder(f).shape}
	h := newHost(2)
	f.Add(e.encode(h.next(time.Second), true), []byte{})
	key := bytes.Clone(e.encode(h.next(time.Second), true))
	f.Add(key, e.encode(h.next(time.Second), false))
	f.Fuzz(func(t *testing.T, one, two []byte) {
		d := ourDecoder(t)
		if _, err := d.decode(one, true); err != nil {
			return
		}
		d.decode(two, false)
	})
}

// TestHostileSizes decodes what claims to be very large.
func TestHostileSizes(t *testing.T) {
	long := append([]byte{0b10}, binary.AppendUvarint(nil, 1<<40)...) // Frame.Containers
	good := append([]byte{0b10}, 2, 1<<1|1, 0b10, 0, 0, 1, 'a')
	if f, err := ourDecoder(t).decode(good, true); err != nil || len(f.Containers) != 1 || f.Containers[0].Name != "a" {
		t.Fatalf("%+v, %v: the deltas below are not what they should be", f, err)
	}
	var list []byte
	list = append([]byte{0b10}, binary.AppendUvarint(nil, maxRaw/2)...)
	list = append(list, bytes.Repeat([]byte{1 << 1}, maxRaw/2)...) // zero values, a byte each
	text := append([]byte{0b10}, binary.AppendUvarint(nil, 2)...)
	text = append(text, 1<<1|1, 0b10, 0, 0, 0)
	text = append(text, binary.AppendUvarint(nil, 1<<50)...) // its name
	for name, delta := range map[string][]byte{"a long list": long, "a list that is there": list, "a long text": text, "an endless number": bytes.Repeat([]byte{0xff}, 40), "nothing": nil} {
		d := ourDecoder(t)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f, err := d.decode(delta, true)
		runtime.ReadMemStats(&after)
		if delta != nil && err == nil || delta == nil && len(f.Containers) > 0 {
			t.Errorf("%s: %d containers, %v", name, len(f.Containers), err)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 2*maxMemory {
			t.Errorf("%s took %d bytes", name, took)
		}
	}
	// A block that would become large once it is unpacked.
	b, err := newBlocks()
	if err != nil {
		t.Fatal(err)
	}
	bomb := append([]byte(magic), appendBlock(nil, b.z, blockShape, 0, b.shapeText)...)
	at := len(bomb)
	bomb = appendBlock(bomb, b.z, blockKey, 0, make([]byte, 3*maxRaw))
	binary.LittleEndian.PutUint32(bomb[at+12:], 100)
	checksums(bomb)
	bomb = append(bomb, appendBlock(nil, b.z, blockKey, 0, b.encode(api.Frame{Taken: epoch}, true))...)
	path := filepath.Join(t.TempDir(), "bomb")
	if err := os.WriteFile(path, bomb, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, errs := read(t, path, time.Time{}, time.Time{}); len(got) != 1 || len(errs) != 1 || !errors.Is(errs[0], ErrDamaged) {
		t.Errorf("%d frames, errors %v", len(got), errs)
	}
}
