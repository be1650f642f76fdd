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

// maxBlocks bounds the blocks that are read of one file.
const maxBlocks = 1 << 20

// Reader reads a recording: the ring of an agent, even while the agent writes it, or one file. It
// keeps no file open between calls, has no state, and is safe for concurrent use. A nil Reader has
// no frames.
type Reader struct {
	path string
	ring bool
}

// Open returns a reader of a recording: a folder with a ring, or one file. The error wraps
// fs.ErrNotExist if there is none, fs.ErrPermission if the caller may not read it, and ErrFormat if
// the file is no recording.
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

// Stat describes a recording.
type Stat struct {
	First   time.Time `json:"first,omitzero"` // of the first frame, as recorded; zero without frames
	Last    time.Time `json:"last,omitzero"`
	Frames  int       `json:"frames"`
	Files   int       `json:"files"`
	Bytes   int64     `json:"bytes"`
	Damaged int       `json:"damaged_files,omitempty"` // files with a damaged part, other than an incomplete last frame
}

// Stat describes the recording. It reads no frames, so it does not notice all damage.
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

// Span returns when the first frame and the last were taken; zero times if there are no frames, or
// the recording is unreadable.
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

// Frames yields the frames taken from one time to another, both inclusive, in the order in which
// they were recorded. A zero time is no bound. Frames skips those that follow another by less than
// every, which costs little. If the host's clock was set back, later frames have earlier times. An
// incomplete last frame is left out.
//
// At a damaged part of the recording, Frames yields an error that wraps ErrDamaged, and continues
// after it. It ends after any other error, and when ctx ends, with the error of ctx.
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

// files yields the files with their blocks, oldest or newest first. Each is open until the next.
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
				continue // the writer removed it, or was killed just after it made the file
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
	damaged bool // after the blocks
}

// openFile opens a file and checks that its first line is that of a recording.
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

// maxMemory bounds the memory of one decoded frame, without its text.
const maxMemory = 64 << 20

// elementSize is the most memory that an element of a list takes.
const elementSize = 512

// reading is the state of Frames.
type reading struct {
	every time.Duration
	last  time.Time // of a frame that was yielded

	z       *zstd.Decoder
	stream  bytes.Buffer // the decoder's input so far
	payload []byte
	raw     []byte
}

// frames yields the frames of one file that within accepts. It returns false if yield does.
func (d *reading) frames(f *file, within func(block) bool, yield func(api.Frame, error) bool) bool {
	first := slices.IndexFunc(f.blocks, within)
	last := len(f.blocks) - 1
	for last >= 0 && !within(f.blocks[last]) {
		last--
	}
	start := 0 // of the stream that has the first frame
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
				return true // incomplete
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
	if f.damaged && (first < 0 || last == len(f.blocks)-1) { // wanted frames may follow the damage
		return yield(api.Frame{}, fmt.Errorf("%s: %w", f.Name(), ErrDamaged))
	}
	return true
}

// near reports whether a frame follows the previous one by less than every. Its time may be earlier.
func (d *reading) near(t time.Time) bool {
	return !d.last.IsZero() && !t.Before(d.last) && t.Sub(d.last) < d.every
}

// block reads the text of one block, which continues the stream of the previous block.
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
		// Hide the other methods: with them, the decoder would read everything at once.
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

// parseFrame parses the text of a frame, which is untrusted.
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
