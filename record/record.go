// Package record stores the reports of an agent: a ring of files on disk with one frame every few
// seconds, bounded in size and age. It writes the ring, reads it even while it is written, and
// copies a part into one file to send, with or without names. It neither makes nor interprets
// frames; package api does.
//
// The agent has the only [Writer]. The verbs record and report, and the views, use a [Reader].
//
// A file is a line with its format, and a block for each frame: its JSON, as a part of a zstd
// stream. The stream's window holds the previous frame, so unchanged parts take almost no space.
// Each file starts a stream, and a new stream follows every keyEvery frames. Each block has a
// checksum, by which a reader recognises the incomplete last block of a killed writer.
package record

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/fairlead-project/fairlead/api"
)

var (
	// ErrDamaged means that a part of a recording cannot be read.
	ErrDamaged = errors.New("the recording is damaged")

	// ErrFormat means that a file is no recording, or has a format that this version does not know.
	ErrFormat = errors.New("not a recording that this version can read")
)

// magic is the first line of a file.
const magic = "fairlead recording 2\n"

// The kinds of blocks.
const (
	blockKey  = 'k' // a frame that starts a stream
	blockNext = 'n' // a frame that continues it
)

// keyEvery is the number of frames in a stream. It bounds what a reader of a part must read, and
// how far damage spreads.
const keyEvery = 256

// The bounds of a block. A frame of 60 busy containers takes 250 kB, and a twelfth of that in a stream.
const (
	maxRaw     = 16 << 20
	maxPayload = maxRaw
)

// The window of a stream is a power of two between these, and twice as large as its first frame.
const (
	minWindow = 1 << 18
	maxWindow = 8 << 20
)

// headSize is the size of a block's head, in little endian: length of the payload (4), CRC-32C of
// what follows (4), kind (1), mark (3), length without compression (4), Frame.Taken in nanoseconds
// since 1970 (8).
const headSize = 24

const mark = "flr"

// block is the parsed head of a block.
type block struct {
	at    int64 // offset of the payload
	size  int   // of the payload
	sum   uint32
	kind  byte
	raw   int
	taken int64
}

func (b block) time() time.Time { return time.Unix(0, b.taken).UTC() }

func (b block) end() int64 { return b.at + int64(b.size) }

// putHead writes the head of a block that already contains its payload.
func putHead(block []byte, kind byte, taken int64, raw int) {
	binary.LittleEndian.PutUint32(block[0:], uint32(len(block)-headSize))
	block[8] = kind
	copy(block[9:12], mark)
	binary.LittleEndian.PutUint32(block[12:], uint32(raw))
	binary.LittleEndian.PutUint64(block[16:], uint64(taken))
	binary.LittleEndian.PutUint32(block[4:], crc32.Checksum(block[8:], crc32.MakeTable(crc32.Castagnoli)))
}

// parseHead parses the head of the block at an offset. ok is false if it is none.
func parseHead(head []byte, at int64) (b block, ok bool) {
	b = block{
		at:   at + headSize,
		size: int(binary.LittleEndian.Uint32(head[0:])), sum: binary.LittleEndian.Uint32(head[4:]),
		kind: head[8],
		raw:  int(binary.LittleEndian.Uint32(head[12:])), taken: int64(binary.LittleEndian.Uint64(head[16:])),
	}
	known := b.kind == blockKey || b.kind == blockNext
	return b, known && string(head[9:12]) == mark && b.size <= maxPayload && b.raw <= maxRaw
}

// blocks encodes frames as blocks.
type blocks struct {
	stream *zstd.Encoder // nil: the next frame starts one
	frames int           // in the stream
	raw    bytes.Buffer
	out    bytes.Buffer
}

// frame returns the bytes of a frame in a file, which are valid until the next call. With begin,
// they start a file. After an error, the next call must set begin.
func (b *blocks) frame(f api.Frame, begin bool) ([]byte, error) {
	b.raw.Reset()
	b.out.Reset()
	if begin {
		b.out.WriteString(magic)
	}
	start := b.out.Len()
	b.out.Write(make([]byte, headSize))
	e := json.NewEncoder(&b.raw)
	e.SetEscapeHTML(false)
	if err := e.Encode(f); err != nil {
		return nil, err
	}
	if b.raw.Len() > maxRaw {
		return nil, fmt.Errorf("a frame has %d bytes, more than %d", b.raw.Len(), maxRaw)
	}
	kind := byte(blockNext)
	if begin || b.frames == keyEvery {
		kind, b.frames = blockKey, 0
		if err := b.restart(); err != nil {
			return nil, err
		}
	}
	b.frames++
	if _, err := b.stream.Write(b.raw.Bytes()); err != nil {
		return nil, err
	}
	if err := b.stream.Flush(); err != nil {
		return nil, err
	}
	putHead(b.out.Bytes()[start:], kind, nanoseconds(f.Taken), b.raw.Len())
	return b.out.Bytes(), nil
}

// restart starts a stream with the frame in raw.
func (b *blocks) restart() (err error) {
	window := minWindow
	for window < maxWindow && window < 2*b.raw.Len() {
		window *= 2
	}
	// Use one goroutine, and no more memory than two frames need.
	b.stream, err = zstd.NewWriter(&b.out, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(window), zstd.WithEncoderCRC(false))
	return err
}

// nanoseconds returns t since 1970, or 0 for years that the unit does not cover.
func nanoseconds(t time.Time) int64 {
	if y := t.Year(); y < 1700 || y > 2250 {
		return 0
	}
	return t.UnixNano()
}
