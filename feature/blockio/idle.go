package blockio

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// The bounds of a calibration by itself.
const (
	idleFor     = time.Minute            // for which a disk has to be idle before
	idleRate    = 10                     // requests a second that an idle disk does at the most, for the host's log and the like
	idlePace    = 10 * time.Second       // between two looks at a disk
	idlePhase   = 500 * time.Millisecond // for each figure: ten of these at the most
	idleWatch   = 50 * time.Millisecond  // between two looks at who uses the disk meanwhile
	scratchSize = 256                    // MiB
	scratchPace = 32                     // MiB that are written of it in each second
	scratchPart = 4                      // the file system must have this many times the room of the file
	firstRetry  = 10 * time.Minute
	lastRetry   = 24 * time.Hour
	hostsOwn    = 32 << 20 // bytes that the host may transfer during all of it, for its log and the like
	busyCPUs    = 0.1      // of the time, that some task waited for a CPU before
)

// idler measures the disks of some directories, each while it is idle. The zero value measures
// none.
type idler struct {
	waits  map[string]*idleWait // by directory
	looked time.Time

	holding func(dir string) (block.Disk, error)
	measure func(ctx context.Context, dir string, done *block.Done) (block.Figures, error)
	busy    func(context.Context) bool // the CPUs are, so that no figure would be the disk's
	now     func() time.Time

	cancel  context.CancelFunc // of the calibration under way; nil: there is none
	running sync.WaitGroup
}

// idleWait is what is known of one directory's disk.
type idleWait struct {
	disk     decide.Disk
	requests uint64    // that the disk had completed when it was last looked at
	looked   time.Time // zero: never
	since    time.Time // it is idle
	next     time.Time // it is not tried before
	retry    time.Duration
	why      string // what it waits for, or what has kept it
}

// newIdler makes one for directories.
func newIdler(r kernel.Roots, l cgroup.Layout, dirs []string) *idler {
	i := &idler{waits: make(map[string]*idleWait), measure: measureIn, now: time.Now}
	for _, d := range dirs {
		i.waits[d] = &idleWait{retry: firstRetry}
	}
	i.holding = func(dir string) (block.Disk, error) { return block.Holding(r.Sys, dir) }
	i.busy = func(ctx context.Context) bool { return busy(ctx, l) }
	return i
}

// busy reports whether tasks wait for CPUs, by a second of pressure stall information. Where
// there is none, nobody knows of any.
func busy(ctx context.Context, l cgroup.Layout) bool {
	before, err := cgroup.Stalled(l.V2, "cpu")
	if err != nil {
		return false
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	now, err := cgroup.Stalled(l.V2, "cpu")
	return err == nil && now-before > time.Duration(busyCPUs*float64(time.Second))
}

// measureIn measures a disk in a directory of a file system on it.
func measureIn(ctx context.Context, dir string, done *block.Done) (f block.Figures, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return f, fmt.Errorf("room in %s: %w", dir, err)
	}
	if room := st.Bavail * uint64(st.Bsize); room < scratchPart*scratchSize<<20 {
		return f, fmt.Errorf("%s has room for %d MiB, and %d are wanted", dir, room>>20, scratchPart*scratchSize)
	}
	file, err := block.Scratch(ctx, dir, scratchSize, scratchPace, done)
	if err != nil {
		return f, err
	}
	f, err = block.Calibrate(ctx, file, idlePhase, true, done)
	return f, errors.Join(err, file.Close())
}

// idle reports whether the disk has been idle for long enough, by the requests that it had
// completed at a time.
func (w *idleWait) idle(requests uint64, now time.Time) bool {
	was, looked := w.requests, w.looked
	w.requests, w.looked = requests, now
	if looked.IsZero() || requests < was || float64(requests-was) > idleRate*now.Sub(looked).Seconds() {
		w.since, w.why = now, "it waits until nobody has used the disk for "+idleFor.String()
		return false
	}
	return now.Sub(w.since) >= idleFor
}

// failed puts the next try off.
func (w *idleWait) failed(err error, now time.Time) {
	w.next, w.since = now.Add(w.retry), now
	w.why = fmt.Sprintf("%s; the next try is in %s or later", err, w.retry)
	w.retry = min(2*w.retry, lastRetry)
}

// calibrateIdle looks for a disk that may be measured now, and begins with it. The caller
// holds f.mu.
func (f *BlockIO) calibrateIdle() {
	i := f.idle
	if i == nil || i.cancel != nil {
		return
	}
	now := i.now()
	if now.Sub(i.looked) < idlePace {
		return
	}
	i.looked = now
	for _, dir := range slices.Sorted(maps.Keys(i.waits)) {
		w := i.waits[dir]
		d, err := i.holding(dir)
		if err != nil {
			w.looked, w.why = time.Time{}, fmt.Sprintf("%s: %s", dir, err)
			continue
		}
		w.disk = decide.Disk{Major: d.Major, Minor: d.Minor}
		if c := f.capacity(d); c.Known() {
			w.looked, w.why = time.Time{}, ""
			continue
		}
		requests, err := d.Requests(f.cfg.Roots.Sys)
		switch {
		case err != nil:
			w.why = err.Error()
		case !w.idle(requests, now) || now.Before(w.next):
		default:
			ctx, cancel := context.WithCancel(context.Background())
			i.cancel, w.why = cancel, "it is measured now"
			i.running.Go(func() {
				defer cancel()
				f.calibrated(w, d, dir, f.calibrateAt(ctx, d, dir))
			})
			return
		}
	}
}

// outcome is what came of a calibration.
type outcome struct {
	figures block.Figures
	err     error
}

// calibrateAt measures a disk, and ends at once if anybody else uses it. f.mu is not held.
func (f *BlockIO) calibrateAt(ctx context.Context, d block.Disk, dir string) (out outcome) {
	if f.idle.busy(ctx) {
		return outcome{err: errors.New("the CPUs are busy")}
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var done block.Done
	used, err := f.watch(d, &done)
	if err != nil {
		return outcome{err: err}
	}
	defer f.unwatch()
	var watching sync.WaitGroup
	defer watching.Wait()
	defer stop(nil)
	watching.Go(func() {
		tick := time.NewTicker(idleWatch)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := used(); err != nil {
				stop(err)
				return
			}
		}
	})
	out.figures, out.err = f.idle.measure(ctx, dir, &done)
	if cause := context.Cause(ctx); cause != nil {
		out.err = cause
	} else if out.err == nil {
		out.err = used() // since the last look
	}
	return out
}

// watch has the I/O of all containers measured. The function that it returns names a container that
// has used a disk since. Nothing that this process does there counts.
func (f *BlockIO) watch(d block.Disk, done *block.Done) (used func() error, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calibrating = true
	if f.follow(); f.meter == nil {
		f.calibrating = false
		return nil, fmt.Errorf("who uses the disk is not seen: %s", f.failed)
	}
	at, own := decide.Disk{Major: d.Major, Minor: d.Minor}, f.own()
	read := func() (of map[decide.Place]monitor.Account, host uint64, err error) {
		if f.meter == nil {
			return nil, 0, errors.New("it was stopped")
		}
		r, err := f.meter.Read()
		of = make(map[decide.Place]monitor.Account)
		for _, a := range r.Accounts {
			switch {
			case a.Disk != at:
			case a.Container == decide.System, a.Container == own:
				host += a.ReadBytes + a.WriteBytes
			default:
				of[decide.Place{Container: a.Container, Disk: a.Disk}] = a
			}
		}
		return of, host, err
	}
	before, hostBefore, err := read()
	if err != nil {
		f.calibrating = false
		return nil, err
	}
	return func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.follow() // containers may have started meanwhile
		now, host, err := read()
		if err != nil {
			return err
		}
		for p, a := range now {
			if b := before[p]; a.Reads+a.Writes > b.Reads+b.Writes {
				return fmt.Errorf("%q (%s) used %s", f.name(p.Container), p.Container, d.Name)
			}
		}
		if host-min(hostBefore, host) > done.Bytes.Load()+hostsOwn {
			return fmt.Errorf("the host used %s", d.Name)
		}
		return nil
	}, nil
}

// own is the container in which this process runs; System if it is in none.
func (f *BlockIO) own() container.ID {
	for _, c := range f.cfg.Containers.Running() {
		if tids, err := cgroup.Threads(c.Cgroup.V2, maxThreads); err == nil && slices.Contains(tids, os.Getpid()) {
			return c.ID
		}
	}
	return decide.System
}

func (f *BlockIO) unwatch() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calibrating = false
	f.follow()
}

// calibrated takes over what came of a calibration.
func (f *BlockIO) calibrated(w *idleWait, d block.Disk, dir string, out outcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.idle.cancel = nil
	if errors.Is(out.err, context.Canceled) {
		return // the agent ends
	}
	if out.err == nil {
		c, was := capacityOf(out.figures, idlePhase), f.capacity(d)
		c.Seen, c.Realtime = was.Seen, was.Realtime
		if was.Headroom > 0 {
			c.Headroom = was.Headroom
		}
		if out.err = c.Check(); out.err == nil {
			out.err = f.capacities.set(d.Identity(), c)
		}
	}
	if out.err != nil {
		w.failed(out.err, f.idle.now())
		f.cfg.Log.Info("disk not calibrated", "disk", d.Name, "scratch", filepath.Clean(dir), "err", out.err, "retry", w.next)
		return
	}
	w.why = ""
	f.cfg.Log.Info("disk calibrated", "disk", d.Name, "scratch", filepath.Clean(dir), "figures", fmt.Sprintf("%+v", out.figures))
}

// capacityOf is a capacity that was measured.
func capacityOf(f block.Figures, each time.Duration) decide.Capacity {
	return decide.Capacity{
		BlockIOFigures: api.BlockIOFigures{ReadIOPS: f.Reads, WriteIOPS: f.Writes, ReadBytes: f.BytesRead, WriteBytes: f.BytesPut},
		Depth1:         api.BlockIOFigures{ReadIOPS: f.Reads1, WriteIOPS: f.Writes1}, Depth: f.Depth, Seconds: each.Seconds(),
		Headroom: decide.UsualHeadroom, Measured: true, Recorded: time.Now().Truncate(time.Second),
	}
}

// awaited are the disks that are to be calibrated, with what that waits for. The caller
// holds f.mu.
func (f *BlockIO) awaited() map[decide.Disk]string {
	out := make(map[decide.Disk]string)
	if f.idle == nil {
		return out
	}
	for _, w := range f.idle.waits {
		if w.disk != (decide.Disk{}) && w.why != "" {
			out[w.disk] = w.why
		}
	}
	return out
}
