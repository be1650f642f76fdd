package isolate

import (
	"errors"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// queue is a receive queue of an uplink with a polling thread of its own. While it serves a single
// container, by RSS, ntuple rules or other steering before the host, that thread lives in the
// container's cgroup: then the work before the container is charged exactly, too (Iron's queue per
// container, without asking the hardware for it).
type queue struct {
	napi    int // the id of its NAPI, which the packets carry too
	thread  sched.Thread
	control queueControl
	last    drop.Queue // the counters at the last look
}

// countQueues starts counting for the queues of a device that threads poll. A NAPI without a
// receive queue brings no packets, and is never given.
func (is *Isolator) countQueues(ns *netdev.NS, index int, threads []thread) ([]*queue, error) {
	napis, err := ns.NAPIs(index)
	if errors.Is(err, netdev.ErrNoNAPIList) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []*queue
	for _, napi := range napis {
		i := slices.IndexFunc(threads, func(t thread) bool { return t.TID == napi.Thread })
		if i < 0 {
			continue // made since the threads were placed
		}
		if err := is.cfg.Drop.CountQueue(napi.ID); err != nil {
			return list, err
		}
		list = append(list, &queue{napi: napi.ID, thread: threads[i].Thread, control: newQueueControl()})
	}
	return list, nil
}

// Glance adapts to what cannot wait for the end of a window: the owners of the uplinks' queues.
func (is *Isolator) Glance(now time.Time) error {
	if is.cfg.Drop == nil {
		return nil // nothing is counted
	}
	length := now.Sub(is.looked)
	is.looked = now
	return errors.Join(is.assignQueues(length), is.pace(now))
}

// assignQueues assigns each queue to the receiver of its packets in the last window.
func (is *Isolator) assignQueues(length time.Duration) error {
	if is.host == nil {
		return nil
	}
	var errs []error
	for _, u := range is.host.devices {
		for _, q := range u.queues {
			now, err := is.cfg.Drop.Queue(q.napi)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			w := queueWindow{length, drop.Queue{Own: now.Own - q.last.Own, Others: now.Others - q.last.Others, Stale: now.Stale - q.last.Stale, Slot: now.Slot}}
			if s := is.owner(q.control.owner); s != nil {
				s.alone += w.Own
			}
			q.last = now
			errs = append(errs, is.assignQueue(u, q, w))
		}
	}
	return errors.Join(errs...)
}

func (is *Isolator) assignQueue(u *uplinkDevice, q *queue, w queueWindow) error {
	before := q.control
	owner := q.control.next(w, is.cfg.QueueMin, is.cfg.QueueFlood)
	if owner == before.owner {
		return nil
	}
	err := is.giveQueue(u, q, owner)
	if err == nil {
		return nil
	}
	if owner == nobody {
		q.control = before // so that the next window tries again
		return err
	}
	// It may have been moved in only one hierarchy. It then gets no owner, or others' packets would
	// wait for this one's share of the CPU.
	if back := is.giveQueue(u, q, nobody); back != nil {
		return errors.Join(err, back) // until the owner ends, or loses it
	}
	q.control = newQueueControl()
	return err
}

// giveQueue moves the thread of a queue to the tenant in a slot. For nobody, and for a tenant that
// has gone, it moves the thread back to the uplinks.
//
// The host owns the changes, as the queue outlives the container. A thread that has ended has no
// owner: its device has recreated its queues.
func (is *Isolator) giveQueue(u *uplinkDevice, q *queue, slot uint32) error {
	s := is.owner(slot)
	if s == nil {
		return IgnoreGone(is.move(q.thread, u.at, is.owns(0)))
	}
	at := s.at
	at.child = false // it exists, and its entry is the container's
	at.nice = ""
	steered := sched.Affinity(is.cfg.Roots.Proc, q.thread).Ref() // the container's CPUs apply now
	return IgnoreGone(errors.Join(is.restore(func(e journal.Entry) bool { return e.Ref == steered }), is.move(q.thread, at, is.owns(0))))
}

// owner returns the tenant in a slot if it pays for the threads of its queues, else nil: one that may
// have none pays for none, whatever its packets have earned it.
func (is *Isolator) owner(slot uint32) *isolation {
	for _, s := range is.isolated {
		if s.drops != nil && s.drops.Slot == slot && s.queues {
			return s
		}
	}
	return nil
}

// allowQueues checks whether a tenant benefits from queues of its own while its container has a quota,
// in CPUs (0: none), and kernel threads are not throttled: these use that up without limit, and leave
// the container's own tasks nothing. One more of them, on a CPU of its own, is too many; if all are on
// one CPU the weight divides that among them. A tenant that may have none loses its queues, and has to
// earn them again.
func (is *Isolator) allowQueues(s *isolation, c container.Container, quota float64) error {
	may := quota == 0
	if !may && c.Cgroup.CPUSet != "" {
		cpus, err := cgroup.CPUs(c.Cgroup.CPUSet)
		if err != nil {
			return err
		}
		may = len(cpus) == 1
	}
	if may == s.queues {
		return nil
	}
	if err := is.takeQueues(s); err != nil {
		return err
	}
	s.queues = may
	return nil
}

// takeQueues takes back the queues of a tenant, for example because its cgroup is about to go.
func (is *Isolator) takeQueues(s *isolation) error {
	if is.host == nil || s.drops == nil {
		return nil
	}
	var errs []error
	for _, u := range is.host.devices {
		for _, q := range u.queues {
			if q.control.owner != s.drops.Slot {
				continue
			}
			if err := is.giveQueue(u, q, nobody); err != nil {
				errs = append(errs, err)
				continue
			}
			q.control = newQueueControl()
		}
	}
	return errors.Join(errs...)
}
