package netcpu

import (
	"errors"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel"
)

// loop acts on the traffic of each window until Close. Glances in between catch what would disturb
// others before the window ends.
func (n *Netcpu) loop() {
	defer close(n.done)
	tick := time.NewTicker(law.Tick)
	defer tick.Stop()
	told := n.failed("following the traffic")
	for glances := 1; ; glances++ {
		select {
		case <-n.stop:
			return
		case now := <-tick.C:
			n.following.Turn(func() { told(n.look(now, glances%int(law.Window/law.Tick) == 0)) })
		}
	}
}

// look does one glance, and ends a window if whole is set. A call that hangs with mu held blocks it
// for all isolated containers; Loops reports that.
func (n *Netcpu) look(now time.Time, whole bool) error {
	n.following.Begin()
	defer n.following.End()
	n.mu.Lock()
	err := n.isolator.Glance(now)
	if whole {
		err = errors.Join(err, n.isolator.Follow(now), n.follow())
	}
	n.mu.Unlock()
	if whole && n.meter != nil {
		err = errors.Join(err, n.meter.Err()) // may wait while a window begins or ends
	}
	return err
}

// failed returns a function that logs errors of a loop, at a limited rate: a container can make every
// window fail, each time with a new text. It ignores objects that have gone with their container.
func (n *Netcpu) failed(at string) func(error) {
	seldom, windows := rate.Sometimes{Interval: law.Long}, 0
	return func(err error) {
		if err == nil || kernel.Gone(err) {
			return
		}
		windows++
		seldom.Do(func() {
			n.cfg.Log.Warn(at, "feature", name, "windows", windows, "err", err)
			windows = 0
		})
	}
}
