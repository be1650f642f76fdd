package blockio

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
)

// A disk is idle after a minute of next to nothing, and each use of it begins that anew.
func TestIdle(t *testing.T) {
	w := idleWait{}
	for _, x := range []struct {
		second   int
		requests uint64
		idle     bool
	}{
		{0, 5000, false},
		{10, 5000, false},
		{50, 5050, false},
		{60, 5100, true}, // since the first look
		{70, 5500, false},
		{129, 5500, false},
		{130, 5500, true},
		{140, 0, false}, // another disk has its number now
		{199, 0, false},
		{200, 0, true},
	} {
		if got := w.idle(x.requests, second(x.second)); got != x.idle {
			t.Errorf("after %d s with %d requests: %v", x.second, x.requests, got)
		}
	}
}

// Each failure puts the next try further off, up to a day.
func TestRetries(t *testing.T) {
	w := idleWait{retry: firstRetry}
	last := time.Duration(0)
	for range 12 {
		w.failed(errors.New("somebody used it"), second(0))
		after := w.next.Sub(second(0))
		if after < last || after > lastRetry {
			t.Errorf("next after %v, before after %v", after, last)
		}
		last = after
	}
	if last != lastRetry || !strings.Contains(w.why, "somebody used it; the next try is in 24h0m0s") {
		t.Errorf("at last after %v: %s", last, w.why)
	}
}

// idleHost is a host one of whose disks may be measured, by what the test says. tick lets
// time pass in which the disk is idle, and says whether it is measured.
func idleHost(t *testing.T, measure func(context.Context, string, *block.Done) (block.Figures, error)) (_ *host, _ *loop.Disk, tick func() bool) {
	h := newHost(t)
	l, err := loop.New(t.TempDir(), 4<<20)
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	i := newIdler(kernel.Default(), h.layout, []string{"/srv"})
	i.holding = func(string) (block.Disk, error) { return block.Open("/sys", l.Path) }
	i.measure = measure
	i.busy = func(context.Context) bool { return false }
	at := 0
	i.now = func() time.Time { return second(at) }
	h.BlockIO.idle = i
	return h, l, func() (begins bool) {
		t.Helper()
		for range 10 {
			h.mu.Lock()
			at += int(lastRetry / time.Second)
			i.waits["/srv"].since = second(0) // it is idle all the time
			h.calibrateIdle()
			begins = begins || h.idle.cancel != nil
			h.mu.Unlock()
		}
		return begins
	}
}

// What was measured of an idle disk is its capacity, and it is measured once.
func TestCalibrateIdle(t *testing.T) {
	want := block.Figures{Reads: 900, Writes: 800, Reads1: 90, Writes1: 80, BytesRead: 900 * decide.SmallRequest, BytesPut: 900 * decide.SmallRequest, Depth: 64}
	h, l, tick := idleHost(t, func(context.Context, string, *block.Done) (block.Figures, error) { return want, nil })
	cpus := true
	h.BlockIO.idle.busy = func(context.Context) bool { return cpus }
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	if !tick() {
		t.Error("not begun")
	}
	h.BlockIO.idle.running.Wait()
	if w := h.BlockIO.idle.waits["/srv"]; h.BlockIO.capacity(d).Known() || !strings.Contains(w.why, "CPUs are busy") {
		t.Errorf("beside busy CPUs: %s", w.why)
	}
	cpus = false
	if !tick() {
		t.Error("not begun again")
	}
	h.BlockIO.idle.running.Wait()
	if c := h.BlockIO.capacity(d); c.ReadIOPS != 900 || c.Depth1.WriteIOPS != 80 || c.Depth != 64 || !c.Measured || c.Headroom != decide.UsualHeadroom || !strings.Contains(c.Basis(), "64 at once, and one at a time") {
		t.Errorf("capacity %+v, %s", c, c.Basis())
	}
	if tick() {
		t.Error("measured again")
	}
	if h.meter != nil {
		t.Error("who uses the disk is still measured")
	}
}

// A container that uses the disk ends it, and is named. So does the end of the agent.
func TestCalibrateIdleStops(t *testing.T) {
	begun := make(chan struct{}, 1)
	h, l, tick := idleHost(t, func(ctx context.Context, _ string, done *block.Done) (block.Figures, error) {
		done.Bytes.Add(1 << 40)
		begun <- struct{}{}
		<-ctx.Done()
		return block.Figures{}, ctx.Err()
	})
	tick()
	<-begun
	c, cg := h.container("reader")
	run(t, cg, "disk", "--to", l.Path, "--size", "4096")
	h.BlockIO.idle.running.Wait()
	w := h.BlockIO.idle.waits["/srv"]
	if !strings.Contains(w.why, `"reader"`) || !strings.Contains(w.why, c.ID.String()) {
		t.Errorf("ended because %s", w.why)
	}
	if d, err := block.Open("/sys", l.Path); err != nil || h.BlockIO.capacity(d).Known() {
		t.Errorf("it has a capacity all the same (%v)", err)
	}
	if all := h.report().Devices; len(all) == 0 || !strings.Contains(all[0].Calibration, `"reader"`) {
		t.Errorf("not told: %+v", all)
	}
	*h.roster = nil // what it reads is the host's now, and far less than what is measured
	tick()
	<-begun
	must(t, h.Close())
}

// What an operator has given is not measured.
func TestCalibrateIdleWhat(t *testing.T) {
	h, l, tick := idleHost(t, func(context.Context, string, *block.Done) (block.Figures, error) {
		return block.Figures{}, errors.New("tried")
	})
	h.capacity(l.Path, 1000)
	if tick() {
		t.Error("measured, though an operator has given it")
	}
}
