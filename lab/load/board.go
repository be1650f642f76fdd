package load

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/hist"
)

// Flood is the rate that means as fast as possible.
const Flood = ^uint64(0)

// boardFD is the descriptor at which a generator finds its board, if its parent passed one.
const boardFD = 3

// Board is memory that a generator shares with the process that measures it. A read takes no time from
// the generator and no turn on its CPU. It is up to date even while the generator may not run.
type Board struct {
	page *page
	file *os.File // nil in the generator
}

// page is the layout of the memory. Every word is read and written atomically.
type page struct {
	ready  uint64
	rate   uint64 // requested rate of a sender: per second, 0 pauses, or Flood
	ops    uint64 // datagrams, requests, writes, units of work
	bytes  uint64
	errors uint64
	stalls uint64 // flows without an answer for a second; see watch
	hist   [buckets]uint64
}

// Histograms of package hist count latencies up to 2^topBits ns (18 minutes).
// queue.bpf.c of package rig has the same histograms.
const (
	subBits = 4
	topBits = 40
	buckets = (topBits - subBits + 1) << subBits
)

// NewHistogram makes an empty histogram of latencies.
func NewHistogram() *hist.Histogram { return hist.New(subBits, topBits) }

const pageSize = (int(unsafe.Sizeof(page{})) + 4095) &^ 4095

// NewBoard creates a board for a generator that is not started yet.
func NewBoard() (*Board, error) {
	fd, err := unix.MemfdCreate("fairlead-load", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make board: %w", err)
	}
	f := os.NewFile(uintptr(fd), "board")
	if err := f.Truncate(int64(pageSize)); err != nil {
		f.Close()
		return nil, fmt.Errorf("make board: %w", err)
	}
	b, err := mapBoard(fd)
	if err != nil {
		f.Close()
		return nil, err
	}
	b.file = f
	return b, nil
}

func mapBoard(fd int) (*Board, error) {
	mem, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map board: %w", err)
	}
	return &Board{page: (*page)(unsafe.Pointer(&mem[0]))}, nil
}

// ownBoard returns the board that the parent passed to this process, a generator, or a private one.
func ownBoard() (*Board, error) {
	var st unix.Stat_t
	if unix.Fstat(boardFD, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == int64(pageSize) {
		return mapBoard(boardFD)
	}
	return &Board{page: new(page)}, nil
}

// Close releases the memory. The generator keeps its mapping. Do not use the Board after Close.
func (b *Board) Close() error {
	mem := unsafe.Slice((*byte)(unsafe.Pointer(b.page)), pageSize)
	b.page = nil
	return errors.Join(unix.Munmap(mem), b.file.Close())
}

// SetRate sets a sender's rate in datagrams per second. 0 pauses the sender, and with Flood it sends as
// fast as it can. Senders without pacing (TCP, request and response) treat every rate but 0 as Flood.
func (b *Board) SetRate(perSecond uint64) { atomic.StoreUint64(&b.page.rate, perSecond) }

func (b *Board) rate() uint64 { return atomic.LoadUint64(&b.page.rate) }

// Ready reports whether the generator is listening, connected or started.
func (b *Board) Ready() bool { return atomic.LoadUint64(&b.page.ready) != 0 }

func (b *Board) setReady() { atomic.StoreUint64(&b.page.ready, 1) }

func (b *Board) count(ops, bytes int) {
	atomic.AddUint64(&b.page.ops, uint64(ops))
	atomic.AddUint64(&b.page.bytes, uint64(bytes))
}

func (b *Board) fail() { atomic.AddUint64(&b.page.errors, 1) }

func (b *Board) stall() { atomic.AddUint64(&b.page.stalls, 1) }

func (b *Board) latency(d time.Duration) {
	atomic.AddUint64(&b.page.hist[hist.Bucket(uint64(d), subBits, buckets)], 1)
}

// Reading is a board's content at one moment.
type Reading struct {
	at   time.Time
	page page
}

// Read takes a reading.
func (b *Board) Read() Reading {
	r := Reading{at: time.Now()}
	r.page.ops = atomic.LoadUint64(&b.page.ops)
	r.page.bytes = atomic.LoadUint64(&b.page.bytes)
	r.page.errors = atomic.LoadUint64(&b.page.errors)
	r.page.stalls = atomic.LoadUint64(&b.page.stalls)
	for i := range r.page.hist {
		r.page.hist[i] = atomic.LoadUint64(&b.page.hist[i])
	}
	return r
}

// Ops returns the work of the generator since its start, in the unit of Window.Ops.
func (b *Board) Ops() uint64 { return atomic.LoadUint64(&b.page.ops) }

// Bytes returns the bytes that the generator has sent or received since its start.
func (b *Board) Bytes() uint64 { return atomic.LoadUint64(&b.page.bytes) }

// Window holds the growth of the counters between two readings.
type Window struct {
	Seconds float64 `json:"seconds"`
	Ops     uint64  `json:"ops"`
	Bytes   uint64  `json:"bytes"`
	Errors  uint64  `json:"errors"`
	// Stalled is the number of a client's flows that got no answer for a second.
	Stalled uint64 `json:"-"`
	hist    hist.Histogram
}

// Since returns the window from an earlier reading of the same board to r.
func (r Reading) Since(earlier Reading) Window {
	w := Window{
		Seconds: r.at.Sub(earlier.at).Seconds(),
		Ops:     r.page.ops - earlier.page.ops,
		Bytes:   r.page.bytes - earlier.page.bytes,
		Errors:  r.page.errors - earlier.page.errors,
		Stalled: r.page.stalls - earlier.page.stalls,
	}
	w.hist = *r.latencies().Since(earlier.latencies())
	return w
}

func (r *Reading) latencies() *hist.Histogram {
	return &hist.Histogram{Sub: subBits, Counts: r.page.hist[:]}
}

// Rate returns Ops per second.
func (w Window) Rate() float64 { return float64(w.Ops) / w.Seconds }

// BitRate returns the rate of Bytes in bit/s.
func (w Window) BitRate() float64 { return 8 * float64(w.Bytes) / w.Seconds }

// Latency returns the q-quantile of the latencies in the window, as [hist.Histogram.Quantile] does.
func (w Window) Latency(q float64) time.Duration { return w.hist.Quantile(q) }
