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

// queue is a receive queue of an uplink that is polled by a thread of its own.
// While all that it brings is one container's, by RSS, ntuple rules or whatever
// steers packets before they reach the host, that thread lives in the
// container's cgroup: then the work before the container is charged exactly,
// too (Iron's queue per container, without asking the hardware for it).
type queue struct {
	napi    int // the id of its NAPI, which is also on the packets
	thread  sched.Thread
	control queueControl
	last    drop.Queue // the counters at the last look
}

// countQueues begins to count what the queues bring of a device that is polled by threads.
// A NAPI that serves no receive queue brings no packets, and is never given.
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
			continue // made since they were placed
		}
		if err := is.cfg.Drop.CountQueue(napi.ID); err != nil {
			return list, err
		}
		list = append(list, &queue{napi: napi.ID, thread: threads[i].Thread, control: newQueueControl()})
	}
	return list, nil
}

// assignQueues gives each queue to whom its packets of the last window belong.
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
			w := queueWindow{length, now.Since(q.last)}
			q.last = now
			errs = append(errs, is.assignQueue(u, q, w))
		}
	}
	return errors.Join(errs...)
}

func (is *Isolator) assignQueue(u *uplinkDevice, q *queue, w queueWindow) error {
	before := q.control
	owner := q.control.next(w, is.cfg.QueueMin)
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
	// It may have been moved in one hierarchy and not in the other. It is nobody's
	// then, or others' packets would wait for this one's share of the CPU.
	if back := is.giveQueue(u, q, nobody); back != nil {
		return errors.Join(err, back) // until the owner ends, or loses it
	}
	q.control = newQueueControl()
	return err
}

// giveQueue moves the thread of a queue to the tenant in a slot, or back to the
// uplinks for nobody and for one that has gone.
//
// All in the host's name, as the queue outlives the container. A thread that has
// ended is with nobody: its device has made its queues anew.
func (is *Isolator) giveQueue(u *uplinkDevice, q *queue, slot uint32) error {
	err := is.moveQueue(u, q, slot)
	if errors.Is(err, journal.ErrGone) {
		return nil
	}
	return err
}

func (is *Isolator) moveQueue(u *uplinkDevice, q *queue, slot uint32) error {
	for _, t := range is.tenants {
		if t.drops != nil && t.drops.Slot() == slot && t.queues {
			at := t.at
			at.child = false // it is there, and its note is the container's
			at.nice = ""
			return errors.Join(is.unsteer(q.thread), is.move(q.thread, at, 0))
		}
	}
	return is.move(q.thread, u.at, 0)
}

// unsteer undoes what steering has done: its CPUs are the container's now.
func (is *Isolator) unsteer(t sched.Thread) error {
	ref := sched.Affinity(is.cfg.Roots.Proc, t).Ref()
	return is.restore(func(e journal.Entry) bool { return e.Ref == ref })
}

// mayOwnQueues says whether a container is better off with queues of its own.
// Where kernel threads are not throttled they eat up a quota unhindered, and the
// container's own tasks get nothing: one more of them, on a CPU of its own, is
// too many. Where all are on one CPU its weight divides that among them.
func (is *Isolator) mayOwnQueues(c container.Container) (bool, error) {
	if is.cfg.Throttled {
		return true, nil
	}
	dir, err := c.TenantGroup()
	if err != nil {
		return false, err
	}
	_, limited, err := cgroup.CPUQuota(dir)
	if err != nil || !limited || c.Cgroup.CPUSet == "" {
		return !limited, err
	}
	cpus, err := cgroup.CPUs(c.Cgroup.CPUSet)
	return len(cpus) == 1, err
}

// allowQueues finds out whether a tenant may own queues now: the quota of its
// container and its CPUs can change at any time. What it has by what was so before
// is taken back, and has to be earned again.
func (is *Isolator) allowQueues(t *tenant, c container.Container) error {
	may, err := is.mayOwnQueues(c)
	if err != nil || may == t.queues {
		return err
	}
	if err := is.takeQueues(t); err != nil {
		return err
	}
	t.queues = may
	return nil
}

// takeQueues takes back the queues of a tenant: its cgroup is about to go, say.
func (is *Isolator) takeQueues(t *tenant) error {
	if is.host == nil || t.drops == nil {
		return nil
	}
	var errs []error
	for _, u := range is.host.devices {
		for _, q := range u.queues {
			if q.control.owner != t.drops.Slot() {
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
