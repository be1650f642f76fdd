package netcpu

import (
	"errors"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel"
)

// loop acts on the traffic of each window, until Close. A glance in between sees what others feel until
// then.
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

// look is one glance, and the end of a window if whole. A call that hangs with the lock held keeps
// it from all isolated containers; Loops shows that outside.
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
		err = errors.Join(err, n.meter.Err()) // waits for a window that begins or ends
	}
	return err
}

// failed returns what logs the errors of a loop: a container can make each window fail, with another
// text, so only time bounds them. What has gone is no failure: its container is about to end.
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
