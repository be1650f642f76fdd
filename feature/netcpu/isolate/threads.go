package isolate

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// threadsByName waits keptWait for the names of new threads if an older kernel may have kept threads,
// otherwise namedWait.
const (
	keptWait  = 50 * time.Millisecond
	namedWait = 2 * time.Second
)

// errNoNAPI means that a device has no NAPI, for example because it is being removed.
var errNoNAPI = errors.New("has no napi")

// bring carries out a plan that makes a device poll, makes threads poll it, and places the threads.
// Their places are a second plan, because the threads exist only then.
func (is *Isolator) bring(d device, plan []journal.Setting, at place, as owned) (list []thread, err error) {
	if err := is.turn(plan, as); err != nil {
		return nil, err
	}
	found, err := is.threads(d, as)
	if err != nil {
		return nil, err
	}
	if is.dry == nil {
		if err := is.held.hold(append(plan, d.threaded()), as.by); err != nil {
			return nil, err
		}
	}
	if len(found) == 0 {
		return nil, is.noteThreads(d.name, at)
	}
	for _, t := range found {
		if err := is.move(t, at, as); err != nil {
			return nil, err
		}
		list = append(list, thread{t, d.name})
	}
	return list, nil
}

// bringVeths sets up the devices and threads of a tenant for c. It then undoes earlier changes for c
// that are no longer wanted: most concern devices that went when a runtime disconnected the container
// from a network, or a cgroup that the container has left. It continues after an error. It returns
// errors about devices that have gone only if there is no other error.
func (is *Isolator) bringVeths(ns *netdev.NS, c container.Container, s shape, at place) (threads []thread, err error) {
	var failed, gone []error
	mine := is.owns(c.ID)
	for _, dev := range c.Interfaces {
		if !dev.HasHostEnd() {
			continue // the device below a macvlan polls for all its macvlans
		}
		polling, err := is.bringVeth(ns, dev, s, at, mine)
		switch {
		case err == nil:
			threads = append(threads, polling...)
		case IgnoreGone(err) == nil:
			gone = append(gone, fmt.Errorf("%s: %w", dev.Name, err))
		default:
			failed = append(failed, fmt.Errorf("%s: %w", dev.Name, err))
		}
	}
	if len(failed) > 0 {
		return threads, errors.Join(failed...)
	}
	weight, _ := cgroup.WeightKnob(at.pays(), is.v2())
	err = is.restore(func(e journal.Entry) bool {
		return e.Owner == mine.by && !mine.turned[e.Ref] && e.Ref != weight.Ref() && e.Ref.Kind != qdisc.KindFilter
	})
	return threads, cmp.Or(err, errors.Join(gone...))
}

// bringVeth calls bring for a device of a container.
func (is *Isolator) bringVeth(ns *netdev.NS, dev container.Interface, s shape, at place, as owned) ([]thread, error) {
	d, err := is.lookAt(ns, dev.Index, dev.Name)
	if err != nil {
		return nil, err
	}
	host, err := is.cfg.Find.Open(dev.Host.NSPath, dev.Host.NetNS)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	d.tso = host.Offload(dev.Host.Index, netdev.TSO)
	list, err := is.bring(d, d.polling(s), at, as)
	if errors.Is(err, errNoNAPI) {
		err = fmt.Errorf("%w: %w", journal.ErrGone, err) // a veth that is being removed stops polling first
	}
	return list, err
}

// move moves a thread to its place.
func (is *Isolator) move(t sched.Thread, at place, as owned) error {
	proc := is.cfg.Roots.Proc
	plan, err := is.planFor(t, at)
	if err != nil {
		return err
	}
	if err := is.turn(plan, as); err != nil || len(at.cpus) == 0 {
		return err
	}
	affinity := sched.Affinity(proc, t)
	now, err := affinity.Read()
	if err != nil {
		return err
	}
	may, err := cgroup.ParseCPUs(now)
	if err != nil {
		return err
	}
	return is.turn(steering(affinity, may, at.cpus), as)
}

func (d device) threaded() journal.Setting {
	return journal.Setting{Knob: d.ns.Threaded(d.index), Value: "1"}
}

// threads makes threads poll a device and returns them, one for each NAPI. In a dry run they may not
// exist yet.
func (is *Isolator) threads(d device, as owned) ([]sched.Thread, error) {
	plan := []journal.Setting{d.threaded()}
	_, err := d.ns.NAPIs(d.index)
	byName := errors.Is(err, netdev.ErrNoNAPIList)
	if byName && is.dry == nil {
		return is.threadsByName(plan, d.name, as)
	}
	if err := is.turn(plan, as); err != nil || byName {
		return nil, err
	}
	list, err := d.ns.NAPIs(d.index)
	if err != nil {
		return nil, err
	}
	var threads []sched.Thread
	for _, napi := range list {
		if napi.Thread == 0 && is.dry != nil {
			continue
		}
		if napi.Thread == 0 {
			return nil, fmt.Errorf("napi %d of %s has no thread", napi.ID, d.name)
		}
		t, err := sched.Find(is.cfg.Roots.Proc, napi.Thread)
		if err != nil {
			return nil, err
		}
		threads = append(threads, t)
	}
	if len(threads) == 0 && is.dry == nil {
		return nil, fmt.Errorf("%s %w", d.name, errNoNAPI)
	}
	if d.tso != nil || len(threads) == 0 {
		return threads, nil // a veth has no unlisted threads
	}
	unlisted, err := is.unlisted(d.name, threads[0])
	return append(threads, unlisted...), err
}

// unlisted returns the threads of NAPIs that only send, as in virtio. Such NAPIs have no ID, so netlink
// omits them (net/core/netdev-genl.c, netdev_nl_napi_fill_one). Their threads start within a second of
// a listed one; a thread of another device with the same name hardly does.
func (is *Isolator) unlisted(device string, listed sched.Thread) ([]sched.Thread, error) {
	const second = 100 // clock ticks
	list, err := is.pollers(device)
	return chosen(list, func(t sched.Named) bool {
		return strings.HasSuffix(t.Comm, "-0") && max(t.Start, listed.Start)-min(t.Start, listed.Start) <= second
	}), err
}

// threadsByName does the work of threads on a kernel that lists no NAPIs (before 6.8). It takes the
// threads with the device's name that appear when the knob is turned on. If the knob is on already, the
// name is not enough, because many containers have an eth0: it takes the threads that the journal has
// as moved for the same owner.
func (is *Isolator) threadsByName(plan []journal.Setting, device string, as owned) ([]sched.Thread, error) {
	knob := plan[0].Knob
	if value, err := knob.Read(); err != nil {
		return nil, err
	} else if value == "1" {
		// The entry may belong to another container in the namespace, which has ended.
		owner := as.by
		if e, ok := is.cfg.Journal.Entry(knob.Ref(), is.cfg.Feature); ok {
			owner = e.Owner
		}
		ours := is.placed(func(e journal.Entry) bool { return e.Owner == owner })
		list, err := is.pollers(device)
		threads := chosen(list, func(t sched.Named) bool { return ours[strconv.Itoa(t.TID)] })
		if err == nil && len(threads) > 0 {
			err = is.turn(plan, as) // the new owner
		}
		if err != nil || len(threads) > 0 {
			return threads, err
		}
		// The knob is on, but not by us. Turn it off first; an older kernel keeps the threads then.
		if err := is.turn([]journal.Setting{{Knob: knob, Value: "0"}}, as); err != nil {
			return nil, err
		}
	}
	before, err := is.pollers(device)
	if err != nil {
		return nil, err
	}
	if err := is.turn(plan, as); err != nil {
		return nil, err
	}
	// The threads exist when the write returns. They set their names when they first run, which may
	// take a while on a busy CPU.
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		after, err := is.pollers(device)
		if err != nil {
			return nil, err
		}
		threads := chosen(after, func(t sched.Named) bool { return !slices.Contains(before, t) })
		if len(threads) > 0 {
			return threads, nil
		}
		waited := time.Since(began)
		if waited < keptWait {
			continue
		}
		// An older kernel keeps a device's threads while softirqs poll it (net/core/dev.c,
		// dev_set_threaded). They are then among the earlier threads, and not placed. An idle thread
		// of another device among them does no harm.
		placed := is.placed(func(journal.Entry) bool { return true })
		kept := chosen(before, func(t sched.Named) bool { return !placed[strconv.Itoa(t.TID)] })
		if len(kept) > 0 {
			return kept, nil
		}
		if waited > namedWait {
			return nil, fmt.Errorf("no thread napi/%s-N came up within %v", device, namedWait)
		}
	}
}

// placed returns the TIDs of moved threads with matching journal entries.
func (is *Isolator) placed(match func(journal.Entry) bool) map[string]bool {
	tids := make(map[string]bool)
	for _, e := range is.cfg.Journal.Entries() {
		if e.Ref.Kind == sched.KindKthread && e.Owner.Feature == is.cfg.Feature && match(e) {
			tid, _, _ := strings.Cut(e.Ref.Object, ":")
			tids[tid] = true
		}
	}
	return tids
}

// pollers lists the threads that poll devices with a name, in any namespace.
func (is *Isolator) pollers(device string) ([]sched.Named, error) {
	prefix := "napi/" + device + "-"
	list, err := sched.Threads(is.cfg.Roots.Proc, prefix)
	return slices.DeleteFunc(list, func(t sched.Named) bool { return !pollsFor(t.Comm, prefix) }), err
}

// pollsFor reports whether a thread with the prefix "napi/DEVICE-" belongs to that device, so that only
// a number follows. A container may give its device a longer name, such as eth0-1.
func pollsFor(comm, prefix string) bool {
	number, ok := strings.CutPrefix(comm, prefix)
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}

func chosen(list []sched.Named, choose func(sched.Named) bool) (threads []sched.Thread) {
	for _, t := range list {
		if choose(t) {
			threads = append(threads, t.Thread)
		}
	}
	return threads
}

// movedAlong updates the entries of our threads that moved with a container's processes from one cgroup
// to another, so that they can still return to their original cgroup.
func (is *Isolator) movedAlong(was, now string) error {
	if was == "" || was == now {
		return nil
	}
	open := kernel.Opener(is.cfg.Roots)
	return is.cfg.Journal.Rename(func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && e.Ref.Kind == sched.KindKthread && e.Wrote == was
	}, func(e journal.Entry) journal.Entry {
		k, err := open(e.Ref)
		if err != nil {
			return e // the thread has ended
		}
		if group, err := k.Read(); err == nil && group == now {
			e.Wrote = now
		}
		return e
	})
}
