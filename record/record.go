// Package record keeps what an agent has reported: a ring of files on disk with one frame every few
// seconds, bounded in size and age. It writes the ring, reads it while it is written, and copies a
// part of it into one file that can be sent, with or without names. It does not make frames, and does
// not say what they mean; package api does.
//
// The agent has the only [Writer]. The verbs record and report, and the views, use a [Reader].
//
// A file is a line with its format, and blocks: the shape of the frames, and frames, each compressed
// by zstd. A frame is written as what differs from the frame before it, container by container, or in
// full at the start of a file. Each block has a checksum, so that the last one of a writer that was
// killed is recognised.
package record

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/fairlead-project/fairlead/api"
)

var (
	// ErrDamaged means that a part of a recording cannot be read.
	ErrDamaged = errors.New("the recording is damaged")

	// ErrFormat means that a file is no recording, or one of a format that this version does not
	// know.
	ErrFormat = errors.New("not a recording that this version can read")
)

// magic is the first line of a file.
const magic = "fairlead recording 1\n"

// The kinds of a block.
const (
	blockShape = 's' // of the frames that follow, as JSON
	blockKey   = 'k' // a frame in full
	blockDelta = 'd' // a frame as delta from the one before
)

// The bounds of a block. A frame of 60 busy containers has 300 kB in full.
const (
	maxRaw     = 16 << 20
	maxPayload = maxRaw
)

// headSize is the size of a block's head, in little endian: length of the payload (4), CRC-32C of
// what follows (4), kind (1), mark (3), length without compression (4), Frame.Taken in nanoseconds
// since 1970 (8).
const headSize = 24

const mark = "flr"

// block is the head of a block.
type block struct {
	at    int64 // offset of the payload
	size  int   // of the payload
	sum   uint32
	kind  byte
	raw   int
	taken int64
}

func (b block) time() time.Time { return time.Unix(0, b.taken).UTC() }

func (b block) frame() bool { return b.kind != blockShape }

func (b block) end() int64 { return b.at + int64(b.size) }

// appendBlock appends a block to buf.
func appendBlock(buf []byte, z *zstd.Encoder, kind byte, taken int64, raw []byte) []byte {
	start := len(buf)
	buf = append(buf, make([]byte, headSize)...)
	buf = z.EncodeAll(raw, buf)
	head := buf[start:]
	binary.LittleEndian.PutUint32(head[0:], uint32(len(head)-headSize))
	head[8] = kind
	copy(head[9:12], mark)
	binary.LittleEndian.PutUint32(head[12:], uint32(len(raw)))
	binary.LittleEndian.PutUint64(head[16:], uint64(taken))
	binary.LittleEndian.PutUint32(head[4:], crc32.Checksum(head[8:], crc32.MakeTable(crc32.Castagnoli)))
	return buf
}

// parseHead returns the head of the block at an offset. ok is false if it is none.
func parseHead(head []byte, at int64) (b block, ok bool) {
	b = block{
		at:   at + headSize,
		size: int(binary.LittleEndian.Uint32(head[0:])), sum: binary.LittleEndian.Uint32(head[4:]),
		kind: head[8],
		raw:  int(binary.LittleEndian.Uint32(head[12:])), taken: int64(binary.LittleEndian.Uint64(head[16:])),
	}
	known := b.kind == blockShape || b.kind == blockKey || b.kind == blockDelta
	return b, known && string(head[9:12]) == mark && b.size <= maxPayload && b.raw <= maxRaw
}

// frameShape returns the shape of api.Frame, and its form in a recording.
func frameShape() (*shape, []byte, error) {
	s, err := shapeOf(reflect.TypeFor[api.Frame]())
	if err != nil {
		return nil, nil, err
	}
	data, err := json.Marshal(s)
	return s, data, err
}

// blocks makes blocks of frames.
type blocks struct {
	encoder
	shapeText []byte
	z         *zstd.Encoder
	out       []byte
}

func newBlocks() (*blocks, error) {
	s, text, err := frameShape()
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	// One goroutine, and no more memory than a frame needs.
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return &blocks{encoder: encoder{shape: s}, shapeText: text, z: z}, nil
}

// frame returns the bytes of a frame in a file. The result is valid until the next call. With begin
// it is the start of a file; with key, the frame does not depend on earlier ones. An error means that
// the frame is too large; the next one must be a key.
func (b *blocks) frame(f api.Frame, begin, key bool) ([]byte, error) {
	b.out = b.out[:0]
	if begin {
		b.out = append(b.out, magic...)
		b.out = appendBlock(b.out, b.z, blockShape, 0, b.shapeText)
	}
	kind := byte(blockDelta)
	if begin || key {
		kind = blockKey
	}
	raw := b.encode(f, kind == blockKey)
	if len(raw) > maxRaw {
		return nil, fmt.Errorf("a frame has %d bytes, more than %d", len(raw), maxRaw)
	}
	taken, _ := nanoseconds(f.Taken)
	b.out = appendBlock(b.out, b.z, kind, taken, raw)
	return b.out, nil
}
