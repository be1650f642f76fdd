package netcpu

import (
	"time"

	"github.com/fairlead-project/fairlead/feature"
)

// window is how often what came meanwhile is acted upon.
const window = time.Second

// Loops implements feature.Looper.
func (n *Netcpu) Loops() []*feature.Loop {
	loops := []*feature.Loop{&n.following}
	if n.charger != nil {
		loops = append(loops, n.charger.Loop())
	}
	return loops
}

// loop looks at what came in each window, and acts on it, until Close.
func (n *Netcpu) loop() {
	defer close(n.done)
	tick := time.NewTicker(window)
	defer tick.Stop()
	var failed failedWindows
	for {
		select {
		case <-n.stop:
			return
		case now := <-tick.C:
			err := n.follow(now)
			if windows := failed.report(now, err); windows > 0 {
				n.cfg.Log.Warn("following the traffic", "feature", name, "windows", windows, "err", err)
			}
		}
	}
}

// follow is one turn. A call that hangs with the lock held keeps it from all isolated
// containers, which is to be seen from outside.
func (n *Netcpu) follow(now time.Time) error {
	n.following.Begin()
	defer n.following.End()
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.isolator.Follow(now)
}

// logEvery is how often the log may say that something went wrong in a window: a
// container can bring that about in each.
const logEvery = time.Minute

// failedWindows decides which errors of loop are logged. Their texts differ from one
// window to the next, so that time alone bounds them.
type failedWindows struct {
	logged time.Time // the last time
	count  int       // since then
}

// report takes one window into account, and returns how many have failed since one
// was last logged: 0 if nothing is to be logged now.
func (f *failedWindows) report(now time.Time, err error) (windows int) {
	if err == nil {
		return 0
	}
	f.count++
	if !f.logged.IsZero() && now.Sub(f.logged) < logEvery {
		return 0
	}
	windows = f.count
	f.logged, f.count = now, 0
	return windows
}
