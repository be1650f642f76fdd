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

// queue is a receive queue of an uplink that one thread polls. RSS, ntuple rules or steering before
// the host may make it serve a single container. Its thread then moves into the container's cgroup, so
// the work before the container is charged exactly, too. This is Iron's queue per container, without
// a request to the hardware.
type queue struct {
	napi    int // its NAPI ID, which packets carry too
	thread  sched.Thread
	control queueControl
	last    drop.Queue // the counters at the last look
}

// countQueues starts to count the packets of a device's queues that threads poll. A NAPI without a
// receive queue brings no packets, so it never gets an owner.
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
			continue // newer than the placement of the threads
		}
		if err := is.cfg.Drop.CountQueue(napi.ID); err != nil {
			return list, err
		}
		list = append(list, &queue{napi: napi.ID, thread: threads[i].Thread, control: newQueueControl()})
	}
	return list, nil
}

// Glance does what cannot wait for the end of a window: it assigns the uplinks' queues and paces floods.
func (is *Isolator) Glance(now time.Time) error {
	if is.cfg.Drop == nil {
		return nil // nothing is counted
	}
	length := now.Sub(is.looked)
	is.looked = now
	return errors.Join(is.assignQueues(length), is.pace(now))
}

// assignQueues decides the owner of each queue from its packets since the last glance.
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
		q.control = before // the next glance tries again
		return err
	}
	// The thread may have moved in only one hierarchy. Move it back, or others' packets would wait for
	// the owner's share of the CPU.
	if back := is.giveQueue(u, q, nobody); back != nil {
		return errors.Join(err, back) // the owner keeps the queue until it ends or loses it
	}
	q.control = newQueueControl()
	return err
}

// giveQueue moves the thread of a queue to the tenant with a slot. If no tenant has the slot, it moves
// the thread back to the uplinks.
//
// The host owns the changes, because the queue outlives the container. A thread that has ended is no
// error: its device has recreated its queues.
func (is *Isolator) giveQueue(u *uplinkDevice, q *queue, slot uint32) error {
	s := is.owner(slot)
	if s == nil {
		return IgnoreGone(is.move(q.thread, u.at, is.owns(0)))
	}
	at := s.at
	at.child = false // the child exists, and the container owns its entry
	at.nice = ""
	steered := sched.Affinity(is.cfg.Roots.Proc, q.thread).Ref() // undone: the container's cpuset applies
	return IgnoreGone(errors.Join(is.restore(func(e journal.Entry) bool { return e.Ref == steered }), is.move(q.thread, at, is.owns(0))))
}

// owner returns the tenant with a slot, or nil if there is none or it may not own queues. Such a tenant
// pays for no queue thread, even if its packets have earned it a queue.
func (is *Isolator) owner(slot uint32) *isolation {
	for _, s := range is.isolated {
		if s.drops != nil && s.drops.Slot == slot && s.queues {
			return s
		}
	}
	return nil
}

// allowQueues decides whether a tenant may own queues. quota is what Weigh returns, in CPUs; 0: none.
// Kernel threads that are not throttled use up a quota without limit and leave nothing for the
// container's tasks. Another such thread, on another CPU, would be too many. If all are on one CPU, the
// weight divides it between threads and tasks. A tenant that may not own queues loses them, and has to
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

// takeQueues takes back the queues of a tenant, for example before its cgroup goes.
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
