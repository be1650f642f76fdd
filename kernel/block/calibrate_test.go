package block

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
)

// The scratch file has the requested size and no name. An interrupted Scratch leaves nothing.
func TestScratch(t *testing.T) {
	dir := t.TempDir()
	var done Done
	file, err := Scratch(t.Context(), dir, 9, 1000, &done)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := file.Stat(); err != nil || info.Size() != 9<<20 || done.Bytes.Load() != 9<<20 {
		t.Errorf("size %v, %v, of which %d bytes were counted", info, err, done.Bytes.Load())
	}
	file.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, pace := range []int64{0, 1} {
		if _, err := Scratch(ctx, dir, 2, pace, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("interrupted: %v", err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Calibrate measures all figures of a disk, and counts the requests. It ends with its context.
func TestCalibrate(t *testing.T) {
	testkit.NeedRoot(t)
	l, err := loop.New(t.TempDir(), 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	file, err := os.OpenFile(l.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var done Done
	f, err := Calibrate(t.Context(), file, 20*time.Millisecond, true, &done)
	if err != nil || f.Reads == 0 || f.Writes == 0 || f.Reads1 == 0 || f.Writes1 == 0 || f.Reads1 > f.Reads || f.Writes1 > f.Writes ||
		f.BytesRead < f.Reads*SmallRequest || f.BytesPut < f.Writes*SmallRequest || f.Depth < 1 || f.Depth > mostDepth {
		t.Errorf("%+v, %v", f, err)
	}
	if n, bytes := done.Requests.Load(), done.Bytes.Load(); n == 0 || bytes < n*SmallRequest {
		t.Errorf("done: %d requests, %d bytes", n, bytes)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		for start := done.Requests.Load(); done.Requests.Load() == start && ctx.Err() == nil; {
			time.Sleep(time.Millisecond)
		}
		cancel(errors.New("in the way"))
	}()
	if _, err := Calibrate(ctx, file, time.Hour, false, &done); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	if _, err := (Load{Size: 8 << 20, Depth: 1}).Run(t.Context(), file, time.Millisecond, nil); err == nil {
		t.Error("requests of more than the disk")
	}
	for _, l := range []Load{{Size: 512, Depth: 1}, {Size: 4096}} {
		if _, err := l.Run(t.Context(), file, time.Millisecond, nil); err == nil {
			t.Errorf("%+v is refused by nobody", l)
		}
	}
}

func TestHolding(t *testing.T) {
	if _, err := Holding("/sys", filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	if _, err := Holding("/sys", "/proc"); !errors.Is(err, ErrNoDevice) {
		t.Errorf("on no disk: %v", err)
	}
}
