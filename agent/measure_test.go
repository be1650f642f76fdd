package agent

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/record"
)

// TestFrame: a frame has the containers and the report of the feature, and the agent makes an
// overview of two of its own.
func TestFrame(t *testing.T) {
	r := newRig(t, 7)
	r.set.set(true, box(7, ""))
	r.view = 10 * time.Millisecond
	r.start()
	f, err := r.client.Frame(t.Context())
	testkit.Must(t, err)
	if len(f.Containers) != 1 || f.Containers[0].ID != 7 || f.Taken.IsZero() {
		t.Errorf("the frame has %+v of %v, want container 7", f.Containers, f.Taken)
	}
	var o api.Overview
	r.until("there is an overview", func() bool {
		o, err = r.client.Overview(t.Context())
		return err == nil && len(o.Rows) == 1
	})
	if o.Rows[0].Container != 7 || !o.Taken.After(o.Since) {
		t.Errorf("the overview is %+v", o)
	}
}

// TestSlowedSamples: each container has a sample, and each loss one with its culprit, the largest
// first, of bounded number.
func TestSlowedSamples(t *testing.T) {
	o := api.Overview{Taken: time.Unix(9, 0), Rows: []api.OverviewRow{{Container: 1, Slowed: 0.5, By: []api.Slowdown{
		{Cause: api.SlowedByPackets, Slowed: 0.1, Culprit: 2, Name: "b"}, {Cause: api.SlowedByCPU, Slowed: 0.4},
	}}}}
	want := []feature.Sample{
		{Container: 1, Name: "slowed_ratio", Value: 0.5},
		{Container: 1, Name: "slowed_by_ratio", Value: 0.4, Labels: []feature.Label{{Name: "cause", Value: "cpu"}, {Name: "culprit", Value: "unknown"}}},
		{Container: 1, Name: "slowed_by_ratio", Value: 0.1, Labels: []feature.Label{{Name: "cause", Value: "packets"}, {Name: "culprit", Container: 2}}},
	}
	testkit.Same(t, "samples", want, slowed(o).Samples)
	for i := range 2 * maxSlowdowns {
		o.Rows[0].By = append(o.Rows[0].By, api.Slowdown{Cause: api.SlowedByPackets, Culprit: api.ID(3 + i)})
	}
	if got := len(slowed(o).Samples); got != 1+maxSlowdowns {
		t.Errorf("%d samples", got)
	}
}

// BenchmarkOverview is the agent's cost of one overview of 60 containers that all take from one
// another, without the reports' own.
func BenchmarkOverview(b *testing.B) {
	const n = 60
	at := time.Unix(1_800_000_000, 0)
	frame := func(after time.Duration) api.Frame {
		f := api.Frame{Taken: at.Add(after), Reports: api.Reports{NetCPU: &api.NetCPU{Since: at, Taken: at.Add(after)}}}
		s := after.Seconds()
		for i := range n {
			c := container.ID(i + 1)
			f.Containers = append(f.Containers, wireContainer(box(c, "")))
			w := s / 2
			a := api.NetCPUAccount{Container: api.ID(c), Tasks: s / 4, Waited: &w, Own: s / 100, Stolen: s / 8}
			for j := range n {
				if i != j {
					a.StolenBy = append(a.StolenBy, api.NetCPUCulprit{Container: api.ID(j + 1), Seconds: s / 8 / n})
					f.NetCPU.Matrix = append(f.NetCPU.Matrix, api.NetCPUTheft{Kind: api.VictimTask, Victim: api.ID(c), Culprit: api.ID(j + 1), Seconds: s / 8 / n})
				}
			}
			f.NetCPU.Accounts = append(f.NetCPU.Accounts, a)
		}
		return f
	}
	before, after := frame(0), frame(overviewEvery)
	for b.Loop() {
		after.After(before)
	}
}

// TestRecorder hands frames to a recorder: they can be read, also by its group, and the status has
// them.
func TestRecorder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "record")
	r, err := newRecorder(Config{RecordConfig: RecordConfig{RecordDir: dir}, Log: quiet()}, make(parts).add("recorder", quiet(), nil))
	testkit.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	go r.run(ctx)
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for i := range 3 {
		r.take(api.Frame{Taken: start.Add(time.Duration(i) * time.Second), Containers: []api.Container{{ID: 7, Name: "web"}}})
		testkit.Await(t, "the frame is recorded", func() bool { return r.status().Frames == uint64(i+1) })
	}
	cancel()
	testkit.Check(t, r.await())
	if s := r.status(); s.Dir != dir || s.Bytes == 0 || s.FrameBytes == 0 || s.Error != "" {
		t.Errorf("%+v", s)
	}
	in, err := record.Open(dir)
	testkit.Must(t, err)
	n := 0
	for f, err := range in.Frames(t.Context(), time.Time{}, time.Time{}, 0) {
		if err != nil || len(f.Containers) != 1 || f.Containers[0].Name != "web" {
			t.Errorf("%+v, %v", f, err)
		}
		n++
	}
	if n != 3 {
		t.Errorf("%d frames", n)
	}
}

// TestRecorderPanics has a frame that the recorder cannot take: it says so, and goes on with another file.
func TestRecorderPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, bad := filepath.Join(t.TempDir(), "record"), false
		r, err := newRecorder(Config{RecordConfig: RecordConfig{RecordDir: dir}, Log: quiet()}, make(parts).add("recorder", quiet(), nil))
		testkit.Must(t, err)
		r.writer, err = record.New(record.Config{Dir: dir, Elapsed: func() time.Duration {
			if bad {
				panic("at odds")
			}
			return 0
		}})
		testkit.Must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		go r.run(ctx)
		for range 3 {
			r.take(api.Frame{Taken: time.Now()})
			synctest.Wait()
			bad = !bad
			r.take(api.Frame{Taken: time.Now()})
			synctest.Wait()
			if why := r.status().Error; strings.Contains(why, "panic: at odds") != bad {
				t.Errorf("bad %v: it says %q", bad, why)
			}
			bad = !bad
			time.Sleep(time.Minute)
		}
		cancel()
		if err := r.await(); err != nil || r.status().Frames != 3 || r.fence.count.Load() != 3 {
			t.Errorf("%v; %+v; %d panics", err, r.status(), r.fence.count.Load())
		}
		if files, err := filepath.Glob(filepath.Join(dir, "*.rec")); len(files) != 3 {
			t.Errorf("files %v, %v", files, err)
		}
	})
}

// TestRecorderWithoutDisk records where that is not possible: it says so once, and nothing waits.
func TestRecorderWithoutDisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	testkit.Must(t, os.WriteFile(file, nil, 0o600))
	var log bytes.Buffer
	r, err := newRecorder(Config{RecordConfig: RecordConfig{RecordDir: filepath.Join(file, "record")}, Log: slog.New(slog.NewTextHandler(&log, nil))}, make(parts).add("recorder", quiet(), nil))
	testkit.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	go r.run(ctx)
	for i := range 3 {
		r.take(api.Frame{})
		testkit.Await(t, "the frame is lost", func() bool { return r.status().Failed == uint64(i+1) })
	}
	if s := r.status(); !strings.Contains(s.Error, "not a directory") || s.Frames != 0 {
		t.Errorf("%+v", s)
	}
	cancel()
	testkit.Check(t, r.await())
	if n := strings.Count(log.String(), "nothing is recorded"); n != 1 {
		t.Errorf("the log says so %d times:\n%s", n, &log)
	}

	for range 5 { // none of these waits, though nothing takes the frames
		r.take(api.Frame{})
	}
	var none *recorder // of an agent that does not record
	none.take(api.Frame{})
	if none.status() != nil || none.await() != nil {
		t.Error("no recorder has a status")
	}
}
