package isolate

import (
	"errors"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Threads of the uplinks help if an idle CPU can run them, if a container owns a queue, or in a flood
// or bulk TCP that is held back. If all CPUs compute and the requests of several servers share a queue,
// threads only add context switches and take turns from all containers. Then the uplinks rest, and
// softirqs poll them as without us.

// restWindow holds the work of the uplinks in some time.
type restWindow struct {
	length        time.Duration
	ran, idle     time.Duration // CPU time of their threads, idle time of their CPUs
	single, super uint64        // packets for isolated containers
	flood         bool          // a flood or bulk TCP comes in, which may be held back
	owned         bool          // a container owns a queue
}

// restControl decides whether the uplinks rest. With the zero value they do not.
type restControl struct {
	rests  bool
	lasts  time.Duration // duration of the rest, or of traffic that asks for it
	second restWindow    // the present second
}

// next counts one window and reports whether the uplinks rest from now on.
func (c *restControl) next(w restWindow) bool {
	if w.flood || w.owned {
		*c = restControl{}
		return false
	}
	s := &c.second
	s.length, s.ran, s.idle = s.length+w.length, s.ran+w.ran, s.idle+w.idle
	s.single, s.super = s.single+w.single, s.super+w.super
	if s.length < time.Second {
		return c.rests
	}
	idle := float64(s.idle) / float64(s.length)
	works, bulk := float64(s.ran) > law.Least*float64(s.length), s.super > s.single
	c.lasts += s.length
	c.second = restWindow{}
	switch {
	case bulk, c.rests && (idle > 3*law.Least || c.lasts >= law.Long), !c.rests && (idle > law.Least || !works):
		*c = restControl{}
	case c.lasts >= law.Calm/2 && !c.rests:
		*c = restControl{rests: true}
	}
	return c.rests
}

// rest makes softirqs or threads poll the uplinks.
func (is *Isolator) rest(w restWindow) error {
	before := is.resting
	for _, u := range is.host.devices {
		w.owned = w.owned || slices.ContainsFunc(u.queues, func(q *queue) bool { return is.owner(q.control.owner) != nil })
	}
	if is.resting.next(w) == before.rests {
		return nil
	}
	if before.rests {
		return is.RenewUplinks(false) // each window repeats it
	}
	err := is.forgetQueues()
	for _, u := range is.host.devices {
		u.threads = nil
	}
	return errors.Join(err, is.restore(func(e journal.Entry) bool {
		kinds := []string{netdev.KindThreaded, netdev.KindRPS, netdev.KindRFS, netdev.KindDefer, sched.KindKthread, sched.KindAffinity, sched.KindSlice, sched.KindNice}
		return e.Owner == is.by(0) && slices.Contains(kinds, e.Ref.Kind)
	}))
}
