package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/record"
)

// RecordConfig says where the agent records its frames. An empty RecordDir means that it does not.
type RecordConfig struct {
	RecordDir  string        // a folder of its own
	RecordSize int64         // the most that it takes on disk, in bytes; 0: record.DefaultSize
	RecordAge  time.Duration // how long frames are kept; 0: record.DefaultAge
}

// recorder records the frames that the agent takes for its overview. A disk that hangs, is full or
// cannot be written costs it frames, and nothing else of the agent anything.
type recorder struct {
	cfg    record.Config
	writer *record.Writer
	log    *slog.Logger
	frames chan api.Frame // capacity 1
	done   chan struct{}  // closed when run has returned
	fence  *fence
	halted atomic.Pointer[string] // why nothing is written after a panic; nil: something is
}

// newRecorder returns the recorder of an agent; nil if it is not to record.
func newRecorder(cfg Config, fence *fence) (*recorder, error) {
	if cfg.RecordDir == "" {
		return nil, nil
	}
	c := record.Config{Dir: cfg.RecordDir, Size: cfg.RecordSize, Age: cfg.RecordAge}
	for _, group := range []string{api.Group, cfg.ViewGroup} { // the last that there is
		if gid, ok := serve.GroupID(group); ok {
			c.Group = gid
		}
	}
	w, err := record.New(c)
	if err != nil {
		return nil, err
	}
	return &recorder{cfg: c, writer: w, log: cfg.Log, frames: make(chan api.Frame, 1), done: make(chan struct{}), fence: fence}, nil
}

// take hands over a frame, which must not change any more. While the one before is still being
// written, it is dropped.
func (r *recorder) take(f api.Frame) {
	if r == nil {
		return
	}
	select {
	case r.frames <- f:
	default:
	}
}

// run writes frames until ctx ends. After a panic it begins with another file.
func (r *recorder) run(ctx context.Context) {
	defer close(r.done)
	r.fence.keep(ctx, r.write, func(err error) {
		why := err.Error()
		r.halted.Store(&why)
		r.fence.panics.try(place{op: "close"}, r.writer.Close)
	})
}

func (r *recorder) write(ctx context.Context) error {
	told := ""
	for {
		select {
		case <-ctx.Done():
			if err := r.writer.Close(); err != nil {
				r.log.Warn("close recording", "err", err)
			}
			return nil
		case f := <-r.frames:
			err := r.writer.Write(f)
			r.halted.Store(nil)
			switch {
			case err != nil && err.Error() != told:
				told = err.Error()
				r.log.Warn("nothing is recorded; the agent goes on and tries again", "err", err)
			case err == nil && told != "":
				told = ""
				r.log.Info("recording again", "dir", r.cfg.Dir)
			}
		}
	}
}

// await waits until run has returned, unless the disk hangs.
func (r *recorder) await() error {
	if r == nil {
		return nil
	}
	select {
	case <-r.done:
		return nil
	case <-time.After(time.Second):
		return errors.New("stop agent: the disk of the recording does not answer")
	}
}

// status returns how recording stands; nil if it is off.
func (r *recorder) status() *api.Recording {
	if r == nil {
		return nil
	}
	out := r.writer.Written()
	if why := r.halted.Load(); why != nil {
		out.Error = *why
	}
	return &out
}
