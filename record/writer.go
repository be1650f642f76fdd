package record

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
)

// The defaults of a ring.
const (
	DefaultSize = 64 << 20
	DefaultAge  = 7 * 24 * time.Hour
)

// minSize is the smallest ring: room for two full frames of a large host.
const minSize = 1 << 20

const (
	files     = 32          // of a full ring
	retryTime = time.Minute // between attempts after an error
)

// ErrBusy means that another writer holds the folder.
var ErrBusy = errors.New("another agent records there")

// Config says where to record. Dir is required.
type Config struct {
	Dir   string        // the ring's own folder; made if it does not exist
	Size  int64         // maximum size of the ring on disk, in bytes; 0: DefaultSize
	Age   time.Duration // frames older than this are removed, at most a sixteenth late; 0: DefaultAge
	Group int           // the group that may read; 0: only root

	Now     func() time.Time     // nil: time.Now
	Elapsed func() time.Duration // monotonic time since any moment; nil: since New
}

// Writer writes a ring of files. It is safe for concurrent use.
type Writer struct {
	cfg Config

	mu     sync.Mutex // guards what follows
	blocks blocks
	lock   *os.File // the folder; nil: not opened yet
	old    []segment
	number uint64 // of the last file
	out    *os.File
	now    segment       // the segment of out
	begun  time.Duration // when out was made
	broken error         // error of the last attempt; nil: it succeeded
	retry  time.Duration // time of the next attempt
	stats  api.Recording
}

// segment is one file of the ring.
type segment struct {
	path string
	size int64
	last time.Duration // when its last frame was taken, on the clock of Elapsed
}

// New returns a writer of a ring. It does not access the disk before the first Write.
func New(cfg Config) (*Writer, error) {
	cfg.Size = cmp.Or(cfg.Size, DefaultSize)
	cfg.Age = cmp.Or(cfg.Age, DefaultAge)
	if cfg.Size < minSize || cfg.Age < time.Minute {
		return nil, fmt.Errorf("record: %d bytes and %v are less than %d and %v", cfg.Size, cfg.Age, int64(minSize), time.Minute)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Elapsed == nil {
		start := time.Now()
		cfg.Elapsed = func() time.Duration { return time.Since(start) }
	}
	return &Writer{cfg: cfg}, nil
}

// Write records a frame. After an error, such as that of a full disk, it drops frames for a minute, returning the same error, and
// then tries again. What was recorded before stays.
func (w *Writer) Write(f api.Frame) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken == nil || w.cfg.Elapsed() >= w.retry {
		w.broken = w.write(f)
		w.retry = w.cfg.Elapsed() + retryTime
	}
	if w.broken != nil {
		w.stats.Failed++
	}
	return w.broken
}

// threadTime returns the CPU time of the calling thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// write writes a frame, and adds the CPU time that it takes to the stats.
func (w *Writer) write(f api.Frame) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
	defer func() { w.stats.CPU += max(threadTime()-began, 0).Seconds() }()
	if err := w.open(); err != nil {
		return fmt.Errorf("record in %s: %w", w.cfg.Dir, err)
	}
	now := w.cfg.Elapsed()
	for len(w.old) > 0 && now-w.old[0].last > w.cfg.Age {
		if err := w.drop(); err != nil {
			return fmt.Errorf("record: %w", err)
		}
	}
	if w.out != nil && (w.now.size >= w.cfg.Size/files || now-w.begun >= w.cfg.Age/16) {
		w.finish()
	}
	begin := w.out == nil
	data, err := w.blocks.frame(f, begin)
	if err == nil && int64(len(data)) > w.cfg.Size/4 {
		err = fmt.Errorf("a frame takes %d bytes, more than a quarter of the ring", len(data))
	}
	if err == nil {
		err = w.append(data, begin)
	}
	if err != nil {
		w.finish() // the next frame cannot continue this stream
		return fmt.Errorf("record in %s: %w", w.cfg.Dir, err)
	}
	w.now.last = now
	w.stats.Frames++
	w.stats.FrameBytes += uint64(len(data))
	return nil
}

// append writes data, at the start of a new file if begin is set.
func (w *Writer) append(data []byte, begin bool) error {
	for len(w.old) > 0 && w.used()+onDisk(int64(len(data))) > w.cfg.Size {
		if err := w.drop(); err != nil {
			return err
		}
	}
	if begin {
		if err := w.begin(); err != nil {
			return err
		}
	}
	// One call, so that readers and a kill almost always find a frame complete.
	if _, err := w.out.Write(data); err != nil {
		return errors.Join(err, w.out.Truncate(w.now.size))
	}
	w.now.size += int64(len(data))
	return nil
}

// open makes the folder and takes over its files, once.
func (w *Writer) open() (err error) {
	if w.lock != nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(w.cfg.Dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(w.cfg.Dir, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	lock, err := os.OpenFile(w.cfg.Dir, unix.O_NOFOLLOW|unix.O_DIRECTORY, 0) // another's link leads to no folder of ours
	if err != nil {
		return err
	}
	defer func() {
		if w.lock != lock { // after an error, or a panic
			err = errors.Join(err, lock.Close())
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return ErrBusy
	} else if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if err := w.share(lock, 0o750); err != nil {
		return err
	}
	paths, err := segments(w.cfg.Dir)
	if err != nil {
		return err
	}
	w.old = nil
	for _, path := range paths {
		s, err := w.adopt(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		w.old = append(w.old, s)
		n, _ := segmentNumber(filepath.Base(path))
		w.number = max(w.number, n)
	}
	w.lock = lock
	return nil
}

// adopt takes over a file of an earlier writer. Its age starts at the time of its last frame, on
// the present wall clock. After that, time is monotonic: a step of the clock removes nothing.
func (w *Writer) adopt(path string) (segment, error) {
	info, err := os.Stat(path)
	if err != nil {
		return segment{}, err
	}
	last := info.ModTime()
	if f, err := openFile(path); err == nil {
		if f.readBlocks() == nil && len(f.blocks) > 0 {
			last = f.blocks[len(f.blocks)-1].time()
		}
		err = w.share(f.File, 0o640) // the group may have changed
		if f.Close(); err != nil {
			return segment{}, err
		}
	}
	return segment{path: path, size: info.Size(), last: w.cfg.Elapsed() - max(w.cfg.Now().Sub(last), 0)}, nil
}

// begin makes the next file.
func (w *Writer) begin() error {
	path := filepath.Join(w.cfg.Dir, fmt.Sprintf("%012d%s", w.number+1, suffix))
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	w.number++
	w.out, w.now, w.begun = out, segment{path: path}, w.cfg.Elapsed()
	return w.share(out, 0o640)
}

// share gives the group read access, if there is a group.
func (w *Writer) share(f *os.File, mode fs.FileMode) error {
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if w.cfg.Group == 0 {
		return nil
	}
	return f.Chown(-1, w.cfg.Group)
}

// finish closes the present file. An empty one it removes.
func (w *Writer) finish() {
	if w.out == nil {
		return
	}
	w.out.Close() // what was written is read again with a checksum
	if w.now.size == 0 {
		os.Remove(w.now.path)
	} else {
		w.old = append(w.old, w.now)
	}
	w.out, w.now = nil, segment{}
}

// drop removes the oldest file.
func (w *Writer) drop() error {
	if err := os.Remove(w.old[0].path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	w.old = w.old[1:]
	return nil
}

// used is what the ring takes on disk.
func (w *Writer) used() int64 {
	sum := onDisk(w.now.size)
	for _, s := range w.old {
		sum += onDisk(s.size)
	}
	return sum
}

// onDisk rounds a size up to the blocks of common file systems.
func onDisk(size int64) int64 { return (size + 4095) &^ 4095 }

// Written returns what was done, and how it stands.
func (w *Writer) Written() api.Recording {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.stats
	if s.Dir, s.Bytes = w.cfg.Dir, uint64(w.used()); w.broken != nil {
		s.Error = w.broken.Error()
	}
	return s
}

// Close ends the recording. What was recorded stays.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.finish()
	if w.lock == nil {
		return nil
	}
	err := w.lock.Close()
	w.lock = nil
	return err
}

// suffix is that of the files of a ring.
const suffix = ".rec"

// segmentNumber returns the number of a file of a ring by its name.
func segmentNumber(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 12 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}
