package sandbox

import (
	"context"
	"reflect"
	"time"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fsnotify/fsnotify"
)

const sourceName = "sandbox"

// relist is how often a source looks without an event: a sandbox of a killed process leaves none.
const relist = time.Second

// settle is how long events are gathered: a state takes a few steps, and sandboxes may come in
// bursts.
const settle = 20 * time.Millisecond

// Source reports the sandboxes with state files in dir, of any process. proc is where proc is
// mounted. The directory need not exist.
func Source(proc, dir string) discover.Source { return source{proc, dir} }

type source struct{ proc, dir string }

func (s source) Name() string { return sourceName }

func (s source) Run(ctx context.Context, publish func(discover.Report)) error {
	tick := time.NewTicker(relist)
	defer tick.Stop()
	// Without a watcher (too many of them on this host) only the ticks remain.
	var events <-chan fsnotify.Event
	watch := func() {}
	if w, err := fsnotify.NewBufferedWatcher(1024); err == nil {
		defer w.Close()
		events = w.Events
		// Again and again: the directory may come later, or go and come.
		watch = func() { w.Add(s.dir) }
		go func() {
			for range w.Errors {
				// Events were lost; the next tick looks.
			}
		}()
	}
	files := &states{dir: s.dir}
	first := true
	var last discover.Report
	for {
		watch()
		var now discover.Report
		now.Records, now.Err = files.records(s.proc)
		if first || !reflect.DeepEqual(now, last) {
			publish(now)
			first, last = false, now
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-events:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(settle):
			}
			for len(events) > 0 {
				<-events
			}
		}
	}
}
