package record

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/fairlead-project/fairlead/api"
)

// maxBlocks is the most blocks that are looked at in one file.
const maxBlocks = 1 << 20

// Reader reads a recording: the ring of an agent, also while that writes it, or one file. It keeps
// nothing open between calls, and has no state: several goroutines may use it. A nil Reader has no
// frames.
type Reader struct {
	path string
	ring bool
}

// Open returns a reader of a recording: a folder with a ring, or one file. The error wraps
// fs.ErrNotExist if there is none, fs.ErrPermission if the caller may not read it, and ErrFormat if a
// file is something else.
func Open(path string) (*Reader, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open recording: %w", err)
	}
	r := &Reader{path: path, ring: info.IsDir()}
	if r.ring {
		_, err = os.ReadDir(path)
	} else {
		var f *file
		if f, err = openFile(path); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open recording: %w", err)
	}
	return r, nil
}

// Stat is what there is of a recording.
type Stat struct {
	First   time.Time `json:"first,omitzero"` // of the first frame, as recorded; zero without frames
	Last    time.Time `json:"last,omitzero"`
	Frames  int       `json:"frames"`
	Files   int       `json:"files"`
	Bytes   int64     `json:"bytes"`
	Damaged int       `json:"damaged_files,omitempty"` // files with a damaged part, beside a last frame that was not completed
}

// Stat returns what there is. It reads no frame, and so does not notice all damage.
func (r *Reader) Stat() (Stat, error) {
	var s Stat
	for f, err := range r.files(false) {
		if err != nil {
			return s, err
		}
		s.Files++
		s.Bytes += f.size
		if f.damaged {
			s.Damaged++
		}
		for _, b := range f.blocks {
			if s.Frames == 0 {
				s.First = b.time()
			}
			s.Frames, s.Last = s.Frames+1, b.time()
		}
	}
	return s, nil
}

// Span returns when the first frame and the last were taken; zero times without frames, or if the
// recording cannot be read.
func (r *Reader) Span() (first, last time.Time) {
	ends := func(backward bool) (t time.Time) {
		for f, err := range r.files(backward) {
			if err != nil {
				break
			}
			if n := len(f.blocks); n > 0 {
				if backward {
					return f.blocks[n-1].time()
				}
				return f.blocks[0].time()
			}
		}
		return t
	}
	return ends(false), ends(true)
}

// Frames yields the frames that were taken from one time to another, both inclusive, in the order in
// which they were recorded; a zero time is no bound. It passes over those that follow another by less
// than every, which costs little. Where the clock of the host was set back, later
// frames have earlier times. A last frame that was not completed is left out.
//
// Where a part of the recording is damaged, Frames yields an error that wraps ErrDamaged, and goes on
// behind it. After another error it ends, and so it does with the error of ctx when that has ended.
func (r *Reader) Frames(ctx context.Context, from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error] {
	return func(yield func(api.Frame, error) bool) {
		z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			yield(api.Frame{}, fmt.Errorf("read recording: %w", err))
			return
		}
		defer z.Close()
		d := &reading{every: every, z: z}
		within := func(b block) bool {
			return (from.IsZero() || !b.time().Before(from)) && (to.IsZero() || !b.time().After(to))
		}
		for f, err := range r.files(false) {
			if err != nil {
				yield(api.Frame{}, err)
				return
			}
			if !d.frames(f, within, func(f api.Frame, err error) bool {
				if e := ctx.Err(); e != nil {
					yield(api.Frame{}, e)
					return false
				}
				return yield(f, err)
			}) {
				return
			}
		}
	}
}

// files yields the files with their blocks, open until the next one, oldest first or newest first.
func (r *Reader) files(backward bool) iter.Seq2[*file, error] {
	return func(yield func(*file, error) bool) {
		if r == nil {
			return
		}
		paths := []string{r.path}
		if r.ring {
			var err error
			if paths, err = segments(r.path); err != nil {
				yield(nil, fmt.Errorf("read recording: %w", err))
				return
			}
		}
		if backward {
			slices.Reverse(paths)
		}
		for _, path := range paths {
			f, err := openFile(path)
			if r.ring && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrFormat)) {
				continue // the writer has removed it, or was killed when it had just made it
			}
			if err == nil {
				err = f.readBlocks()
			}
			if err != nil {
				yield(nil, fmt.Errorf("read recording: %w", err))
				return
			}
			more := yield(f, nil)
			f.Close()
			if !more {
				return
			}
		}
	}
}

// segments lists the files of a ring, oldest first.
func segments(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if _, ok := segmentNumber(e.Name()); ok && e.Type().IsRegular() {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out, nil
}

// file is one open file of a recording.
type file struct {
	*os.File
	size    int64
	blocks  []block
	damaged bool // behind the blocks
}

// openFile opens a file whose first line is that of a recording.
func openFile(path string) (*file, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	line := make([]byte, len(magic))
	if _, err := f.ReadAt(line, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.Join(err, f.Close())
	}
	if string(line) != magic {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, ErrFormat), f.Close())
	}
	return &file{File: f, size: info.Size()}, nil
}

// readBlocks reads the heads of all complete blocks.
func (f *file) readBlocks() error {
	head := make([]byte, headSize)
	for at := int64(len(magic)); at+headSize <= f.size; {
		if _, err := f.ReadAt(head, at); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		b, ok := parseHead(head, at)
		if !ok || len(f.blocks) == maxBlocks {
			f.damaged = true
			return nil
		}
		if b.end() > f.size {
			return nil
		}
		f.blocks = append(f.blocks, b)
		at = b.end()
	}
	return nil
}

// maxMemory bounds what one frame of a recording may take in memory, beside its text.
const maxMemory = 64 << 20

// elementSize is what an element of a list takes at most.
const elementSize = 512

// reading is the state of Frames.
type reading struct {
	every time.Duration
	last  time.Time // of a frame that was yielded

	z       *zstd.Decoder
	stream  bytes.Buffer // of z, as far as it was read
	payload []byte
	raw     []byte
}

// frames yields the frames of one file that are within. It returns false once yield does.
func (d *reading) frames(f *file, within func(block) bool, yield func(api.Frame, error) bool) bool {
	first := slices.IndexFunc(f.blocks, within)
	last := len(f.blocks) - 1
	for last >= 0 && !within(f.blocks[last]) {
		last--
	}
	start := 0 // of the stream with the first
	for i := range first + 1 {
		if f.blocks[i].kind == blockKey {
			start = i
		}
	}
	lost := true
	for i := start; first >= 0 && i <= last; i++ {
		b := f.blocks[i]
		if lost && b.kind != blockKey {
			continue
		}
		err := d.block(f, b)
		wanted := within(b) && !d.near(b.time())
		var frame api.Frame
		if err == nil && wanted {
			frame, err = parseFrame(d.raw)
		}
		lost = err != nil
		switch {
		case errors.Is(err, ErrDamaged):
			if i == len(f.blocks)-1 && !f.damaged {
				return true // not completed
			}
			if !yield(api.Frame{}, fmt.Errorf("%s: at byte %d: %w", f.Name(), b.at, err)) {
				return false
			}
		case err != nil:
			yield(api.Frame{}, fmt.Errorf("read recording: %w", err))
			return false
		case wanted:
			d.last = b.time()
			if !yield(frame, nil) {
				return false
			}
		}
	}
	if f.damaged && (first < 0 || last == len(f.blocks)-1) { // what is wanted may be behind
		return yield(api.Frame{}, fmt.Errorf("%s: %w", f.Name(), ErrDamaged))
	}
	return true
}

// near reports whether a frame follows the one before by less than every. It may be of an earlier time.
func (d *reading) near(t time.Time) bool {
	return !d.last.IsZero() && !t.Before(d.last) && t.Sub(d.last) < d.every
}

// block reads the text of one block, which goes on with the stream of the one before it.
func (d *reading) block(f *file, b block) error {
	d.payload = slices.Grow(d.payload[:0], headSize+b.size)[:headSize+b.size]
	if _, err := f.ReadAt(d.payload, b.at-headSize); errors.Is(err, io.EOF) {
		return ErrDamaged
	} else if err != nil {
		return err
	}
	if crc32.Checksum(d.payload[8:], crc32.MakeTable(crc32.Castagnoli)) != b.sum {
		return ErrDamaged
	}
	if b.kind == blockKey {
		d.stream.Reset()
	}
	d.stream.Write(d.payload[headSize:])
	if b.kind == blockKey {
		// Without its other methods, for which the decoder would read all at once.
		if err := d.z.Reset(struct{ io.Reader }{&d.stream}); err != nil {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	d.raw = slices.Grow(d.raw[:0], b.raw)[:b.raw]
	if _, err := io.ReadFull(d.z, d.raw); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// parseFrame returns a frame by its text, which may be anybody's.
func parseFrame(text []byte) (f api.Frame, err error) {
	const most = maxMemory / elementSize
	if n := bytes.Count(text, []byte("{")) + bytes.Count(text, []byte("null")); n > most {
		return f, fmt.Errorf("%w: a frame with more than %d elements", ErrDamaged, most)
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return api.Frame{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return f, nil
}
