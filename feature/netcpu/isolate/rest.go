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

// Threads of the uplinks help where an idle CPU takes them, where a container pays for one as its
// queue's, and in a flood or bulk TCP that is held back. Where all CPUs compute, and a server's
// requests share a queue, they only add switches, and take their turns from everybody: then the uplinks
// rest, and softirqs poll as without us.

// restWindow is what the uplinks did in some time.
type restWindow struct {
	length        time.Duration
	ran, idle     time.Duration // of their threads, and of their CPUs
	single, super uint64        // packets for those isolated
	flood         bool          // as much comes in as is held back
	owned         bool          // a container pays for a queue
}

// restControl decides whether the uplinks rest. The zero value is that they do not.
type restControl struct {
	rests  bool
	lasts  time.Duration // of the rest, or of traffic that asks for it
	second restWindow    // the present one
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

// rest lets softirqs poll the uplinks, or threads again.
func (is *Isolator) rest(w restWindow) error {
	before := is.resting
	for _, u := range is.host.devices {
		w.owned = w.owned || slices.ContainsFunc(u.queues, func(q *queue) bool { return is.owner(q.control.owner) != nil })
	}
	if is.resting.next(w) == before.rests {
		return nil
	}
	if before.rests {
		return is.RenewUplinks(false) // which each window repeats
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
