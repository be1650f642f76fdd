package isolate

import (
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Threads of the uplinks help where an idle CPU takes them, where a container pays for one as its
// queue's, and in a flood that is held back. Where all CPUs compute, and a server's requests share
// a queue, they only add switches, and take their turns from everybody: then the uplinks rest, and
// softirqs poll as without us. MEASURED.md, "A server beside one that computes", has the
// measurement.
const (
	restAfter = 5 * time.Second // of such traffic: by then a queue is a container's that can be
	restMost  = time.Minute     // then the threads are tried again
	restIdle  = 0.15            // of a CPU: with more idle time the threads have room
)

// restWindow is what the uplinks did in some time.
type restWindow struct {
	length, idle time.Duration // idle: of their CPUs
	works        bool          // the threads do worth mentioning
	flood        bool          // as much comes in as is held back
	owned        bool          // a container has a queue
}

// restControl decides whether the uplinks rest. The zero value is that they do not.
type restControl struct {
	rests      bool
	lasts      time.Duration // of the rest, or of traffic that asks for it
	part, idle time.Duration // of the present second
}

// next counts one window and reports whether the uplinks rest from now on.
func (c *restControl) next(w restWindow) bool {
	c.part, c.idle = c.part+w.length, c.idle+w.idle
	if w.flood || w.owned {
		*c = restControl{}
		return false
	}
	if !c.rests && !w.works {
		c.lasts = 0
	}
	if c.part < time.Second {
		return c.rests
	}
	idle := float64(c.idle) / float64(c.part)
	c.lasts += c.part
	c.part, c.idle = 0, 0
	switch {
	case c.rests && (idle > restIdle || c.lasts >= restMost), !c.rests && idle > paceIdle:
		*c = restControl{}
	case c.lasts >= restAfter && !c.rests:
		*c = restControl{rests: true}
	}
	return c.rests
}

// rest lets softirqs poll the uplinks, or threads again.
func (is *Isolator) rest(w restWindow) error {
	before := is.resting
	w.owned = is.host.owned()
	if is.resting.next(w) == before.rests {
		return nil
	}
	if before.rests {
		return is.RenewUplinks() // which each window repeats
	}
	err := is.forgetQueues()
	for _, u := range is.host.devices {
		u.threads = nil
	}
	return errors.Join(err, is.restore(func(e journal.Entry) bool {
		switch e.Ref.Kind {
		case netdev.KindThreaded, netdev.KindRPS, netdev.KindDefer, sched.KindKthread, sched.KindAffinity, sched.KindSlice, sched.KindNice:
			return e.Owner == is.by(0)
		}
		return false
	}))
}

// owned reports whether a container has a queue of an uplink.
func (u *uplinks) owned() bool {
	for _, d := range u.devices {
		for _, q := range d.queues {
			if q.control.owner != nobody {
				return true
			}
		}
	}
	return false
}
