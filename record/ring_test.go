package record

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// clock is the time of a test: the wall clock and the monotonic one.
type clock struct {
	wall    time.Time
	elapsed time.Duration
}

func (c *clock) pass(d time.Duration) { c.wall, c.elapsed = c.wall.Add(d), c.elapsed+d }

// config returns a Config by this clock.
func (c *clock) config(dir string) Config {
	return Config{Dir: dir, Size: minSize, Age: 24 * time.Hour, Now: func() time.Time { return c.wall }, Elapsed: func() time.Duration { return c.elapsed }}
}

func newWriter(t testing.TB, cfg Config) *Writer {
	t.Helper()
	w := testkit.Opened(New(cfg))(t)
	return w
}

func write(t testing.TB, w *Writer, f api.Frame) {
	t.Helper()
	must(t, w.Write(f))
}

func open(t testing.TB, path string) *Reader {
	t.Helper()
	r, err := Open(path)
	must(t, err)
	return r
}

// read returns all frames from one time to another, and the errors between them.
func read(t testing.TB, path string, from, to time.Time) (frames []api.Frame, errs []error) {
	t.Helper()
	for f, err := range open(t, path).Frames(t.Context(), from, to, 0) {
		if err != nil {
			errs = append(errs, err)
			continue
		}
		frames = append(frames, f)
	}
	return frames, errs
}

func takenOf(frames []api.Frame) (list []time.Time) {
	for _, f := range frames {
		list = append(list, f.Taken)
	}
	return list
}

func segmentsOf(t testing.TB, dir string) []string {
	t.Helper()
	list, err := segments(dir)
	must(t, err)
	return list
}

// TestRing writes over several files and several writers, and reads all of it and parts.
func TestRing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state", "record")
	c := &clock{wall: epoch}
	h := newHost(6)
	var want []api.Frame
	for i := range 3 {
		cfg := c.config(dir)
		if os.Geteuid() == 0 {
			cfg.Group = 64640 + i // another one with each agent
		}
		w := newWriter(t, cfg)
		for range 40 {
			c.pass(5 * time.Second)
			f := h.next(5 * time.Second)
			write(t, w, f)
			want = append(want, f)
		}
		must(t, w.Close())
	}
	if n := len(segmentsOf(t, dir)); n < 4 {
		t.Fatalf("the ring has %d files", n)
	}
	got, errs := read(t, dir, time.Time{}, time.Time{})
	if diff := cmp.Diff(want, got); diff != "" || errs != nil {
		t.Errorf("errors %v, frames (-want +got):\n%s", errs, diff)
	}
	got, errs = read(t, dir, want[50].Taken, want[53].Taken)
	if diff := cmp.Diff(want[50:54], got); diff != "" || errs != nil {
		t.Errorf("a part: errors %v, frames (-want +got):\n%s", errs, diff)
	}
	var apart []time.Time
	for f, err := range open(t, dir).Frames(t.Context(), want[50].Taken, want[60].Taken, 11*time.Second) {
		must(t, err)
		apart = append(apart, f.Taken)
	}
	testkit.Same(t, "some: times", takenOf([]api.Frame{want[50], want[53], want[56], want[59]}), apart)
	r := open(t, dir)
	if first, last := r.Span(); !first.Equal(want[0].Taken) || !last.Equal(want[119].Taken) {
		t.Errorf("span %v to %v", first, last)
	}
	s, err := r.Stat()
	if err != nil || s.Frames != 120 || s.Files != len(segmentsOf(t, dir)) || s.Damaged != 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if info, err := os.Stat(segmentsOf(t, dir)[0]); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	} else if gid := info.Sys().(*syscall.Stat_t).Gid; os.Geteuid() == 0 && gid != 64642 {
		t.Errorf("the first file is of the group %d, not of the last agent's", gid)
	}
}

// TestSize replaces a full ring once: it stays within its size.
func TestSize(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	cfg := c.config(dir)
	h := newHost(10)
	w := newWriter(t, cfg)
	most, first := int64(0), epoch
	for i := 0; w.Written().FrameBytes < uint64(2*cfg.Size); i++ {
		c.pass(time.Minute)
		write(t, w, h.next(time.Minute))
		if i%13 != 0 {
			continue
		}
		disk := int64(0)
		for _, path := range segmentsOf(t, dir) {
			info, err := os.Stat(path)
			must(t, err)
			disk += onDisk(info.Size())
		}
		most = max(most, disk)
		if disk > cfg.Size || uint64(disk) != w.Written().Bytes {
			t.Fatalf("after %v the ring takes %d bytes of %d; the writer says %d", c.elapsed, disk, cfg.Size, w.Written().Bytes)
		}
		first, _ = open(t, dir).Span()
	}
	if most < cfg.Size*8/10 || !first.After(epoch.Add(time.Minute)) {
		t.Errorf("the ring took %d bytes of %d at most, and begins at %v: it was never full", most, cfg.Size, first)
	}
}

// TestAge records little, so that only age bounds the ring.
func TestAge(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	cfg := c.config(dir)
	h := newHost(5)
	for day := range 4 {
		w := newWriter(t, cfg) // age counts over restarts
		for range 24 {
			c.pass(time.Hour)
			write(t, w, h.next(time.Hour))
		}
		w.Close()
		first, _ := open(t, dir).Span()
		if age := c.wall.Sub(first); day > 0 && age > cfg.Age*17/16 || age < cfg.Age*15/16-time.Hour {
			t.Errorf("day %d: the first frame is %v old", day, age)
		}
	}
}

// TestClockSteps sets the clock by years while the writer runs: nothing is removed for it, and the
// order is that of recording.
func TestClockSteps(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: time.Unix(0, 0).UTC()} // a host without a clock of its own, before NTP
	h := newHost(5)
	var want []time.Time
	w := newWriter(t, c.config(dir))
	for _, step := range []time.Duration{0, 56 * 365 * 24 * time.Hour, -time.Hour, 30 * 24 * time.Hour, -30 * 24 * time.Hour} {
		c.wall = c.wall.Add(step)
		for range 100 {
			c.pass(5 * time.Second)
			f := h.next(0)
			f.Taken = c.wall
			want = append(want, f.Taken)
			write(t, w, f)
		}
	}
	if len(segmentsOf(t, dir)) < 3 {
		t.Fatal("all is in one file, which is never removed")
	}
	got, errs := read(t, dir, time.Time{}, time.Time{})
	if diff := cmp.Diff(want, takenOf(got)); diff != "" || errs != nil {
		t.Errorf("errors %v, times (-want +got):\n%s", errs, diff)
	}

	// A writer that begins while the clock is wrong by the past removes nothing either.
	w.Close()
	c.wall = time.Unix(0, 0)
	w = newWriter(t, c.config(dir))
	write(t, w, h.next(0))
	if got, _ := read(t, dir, time.Time{}, time.Time{}); len(got) != len(want)+1 {
		t.Errorf("%d frames are left of %d", len(got), len(want)+1)
	}
}

// TestKilled cuts a ring anywhere in its last frame, as a writer that is killed may leave it: that
// frame is lost and no other, and the next writer goes on.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(5)
	w := newWriter(t, c.config(dir))
	var sizes []int64
	var want []api.Frame
	for range 4 {
		c.pass(time.Second)
		f := h.next(time.Second)
		write(t, w, f)
		want = append(want, f)
		info, err := os.Stat(segmentsOf(t, dir)[0])
		must(t, err)
		sizes = append(sizes, info.Size())
	}
	w.Close()
	whole, err := os.ReadFile(segmentsOf(t, dir)[0])
	must(t, err)
	for cut := sizes[2]; cut < sizes[3]; cut += 1 + (cut-sizes[2])/8*2 { // in the head at each byte, or nearly
		dir := t.TempDir()
		path := filepath.Join(dir, "000000000001.rec")
		must(t, os.WriteFile(path, whole[:cut], 0o600))
		w := newWriter(t, c.config(dir))
		next := h.next(time.Second)
		write(t, w, next)
		w.Close()
		got, errs := read(t, dir, time.Time{}, time.Time{})
		if diff := cmp.Diff(append(want[:3:3], next), got); diff != "" || errs != nil {
			t.Fatalf("cut at %d: errors %v, frames (-want +got):\n%s", cut, errs, diff)
		}
	}
	// Also if the file is long enough and its end was never written.
	torn := append([]byte(nil), whole...)
	clear(torn[len(torn)-20:])
	path := filepath.Join(t.TempDir(), "torn")
	must(t, os.WriteFile(path, torn, 0o600))
	if got, errs := read(t, path, time.Time{}, time.Time{}); len(got) != 3 || errs != nil {
		t.Errorf("%d frames, errors %v", len(got), errs)
	}
	// And if it ends within its first line.
	dir = t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "000000000001.rec"), whole[:5], 0o600))
	if got, errs := read(t, dir, time.Time{}, time.Time{}); got != nil || errs != nil {
		t.Errorf("%d frames, errors %v", len(got), errs)
	}
}

// TestDamaged flips a bit of a frame in the middle of a file: what depends on it is lost, and what
// follows in the next file is not.
func TestDamaged(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(5)
	w := newWriter(t, c.config(dir))
	for len(segmentsOf(t, dir)) < 3 {
		c.pass(time.Second)
		write(t, w, h.next(time.Second))
	}
	all, _ := read(t, dir, time.Time{}, time.Time{})
	path := segmentsOf(t, dir)[1]
	before, _ := read(t, segmentsOf(t, dir)[0], time.Time{}, time.Time{})
	f, err := openFile(path)
	must(t, err)
	defer f.Close()
	must(t, f.readBlocks())
	data, err := os.ReadFile(path)
	must(t, err)
	for name, at := range map[string]int64{"payload": f.blocks[3].at + 7, "head": f.blocks[3].at - headSize + 9} {
		broken := append([]byte(nil), data...)
		broken[at] ^= 0x10
		must(t, os.WriteFile(path, broken, 0o600))
		got, errs := read(t, dir, time.Time{}, time.Time{})
		if len(errs) != 1 || !errors.Is(errs[0], ErrDamaged) {
			t.Errorf("%s: errors %v", name, errs)
		}
		want := append(takenOf(all[:len(before)+3]), takenOf(all[len(before)+len(f.blocks):])...)
		if diff := cmp.Diff(want, takenOf(got)); diff != "" {
			t.Errorf("%s: times (-want +got):\n%s", name, diff)
		}
	}
}

// TestReadWhileWritten reads on and on beside a writer that removes old files.
func TestReadWhileWritten(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(20)
	w := newWriter(t, c.config(dir))
	write(t, w, h.next(time.Second))
	stop := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			r, err := Open(dir)
			if err != nil {
				t.Error(err)
				return
			}
			last := time.Time{}
			for f, err := range r.Frames(t.Context(), time.Time{}, time.Time{}, 0) {
				if err != nil || !f.Taken.After(last) || len(f.Containers) != 20 {
					t.Errorf("frame of %v after %v: %d containers, %v", f.Taken, last, len(f.Containers), err)
					return
				}
				last = f.Taken
			}
		}
	})
	for first := segmentsOf(t, dir)[0]; segmentsOf(t, dir)[0] == first; {
		c.pass(time.Second)
		write(t, w, h.next(time.Second))
	}
	close(stop)
	reader.Wait()
}

// TestTwoWriters checks that the second leaves the ring of the first alone.
func TestTwoWriters(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(5)
	one, two := newWriter(t, c.config(dir)), newWriter(t, c.config(dir))
	write(t, one, h.next(time.Second))
	testkit.Is(t, "the second", two.Write(h.next(time.Second)), ErrBusy)
	one.Close()
	testkit.Is(t, "the second, before it tries again", two.Write(h.next(time.Second)), ErrBusy)
	c.pass(retryTime)
	write(t, two, h.next(time.Second))
	if s := two.Written(); s.Frames != 1 || s.Failed != 2 || s.Error != "" || s.CPU <= 0 {
		t.Errorf("%+v", s)
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	testkit.Is(t, "no file", testkit.Err(Open(filepath.Join(dir, "none"))), fs.ErrNotExist)
	path := filepath.Join(dir, "text")
	must(t, os.WriteFile(path, []byte("a text that is longer than the first line of a recording\n"), 0o600))
	testkit.Is(t, "another file", testkit.Err(Open(path)), ErrFormat)
	testkit.Fails(t, "a ring of one byte", testkit.Err(New(Config{Dir: dir, Size: 1})))
}

// TestFullRing fills the disk below a ring: nothing that was recorded is lost, and once there is room
// again it goes on.
func TestFullRing(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(5)
	w := newWriter(t, c.config(dir))
	write(t, w, h.next(time.Second))
	// A file that takes no more: the kernel's own full disk.
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	must(t, err)
	good := w.out
	w.out = full
	err = w.Write(h.next(time.Second))
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("%v", err)
	}
	good.Close()
	if w.out != nil {
		t.Error("a frame that depends on the lost one could be written")
	}
	testkit.Is(t, "before it tries again", w.Write(h.next(time.Second)), syscall.ENOSPC)
	c.pass(retryTime)
	write(t, w, h.next(time.Second))
	got, errs := read(t, dir, time.Time{}, time.Time{})
	if len(got) != 2 || errs != nil {
		t.Errorf("%d frames, errors %v", len(got), errs)
	}
	if s := w.Written(); s.Failed != 2 || s.Error != "" {
		t.Errorf("%+v", s)
	}
}

// What the stream of a small host takes counts twice in the agent's memory: the collector of garbage
// waits for as much again.
func TestMemory(t *testing.T) {
	c := &clock{wall: epoch}
	w, f := newWriter(t, c.config(t.TempDir())), newHost(5).next(time.Second)
	if n := allocated(func() { write(t, w, f) }); n > 3<<19 {
		t.Errorf("the first frame took %d bytes", n)
	}
}
