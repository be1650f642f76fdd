package isolate

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// How long threadedByName waits for the names of new threads: where there are
// threads that an older kernel may have kept, and where there are none.
const (
	keptWait  = 50 * time.Millisecond
	namedWait = 2 * time.Second
)

// errNoNAPI says that a device does not poll: for one, as it is on its way out.
var errNoNAPI = errors.New("has no napi")

// threaded turns the knob and returns the threads, one for each NAPI.
func (is *Isolator) threaded(ns *netdev.NS, index int, device string, id container.ID) ([]sched.Thread, error) {
	knob := ns.Threaded(index)
	if _, err := ns.NAPIs(index); errors.Is(err, netdev.ErrNoNAPIList) {
		return is.threadedByName(knob, device, id)
	}
	if err := is.turn(knob, "1", id); err != nil {
		return nil, err
	}
	list, err := ns.NAPIs(index)
	if err != nil {
		return nil, err
	}
	var threads []sched.Thread
	for _, napi := range list {
		if napi.Thread == 0 {
			return nil, fmt.Errorf("napi %d of %s has no thread", napi.ID, device)
		}
		t, err := sched.Find(is.cfg.Roots.Proc, napi.Thread)
		if err != nil {
			return nil, err
		}
		threads = append(threads, t)
	}
	if len(threads) == 0 {
		return nil, fmt.Errorf("%s %w", device, errNoNAPI)
	}
	return threads, nil
}

// threadedByName does the same where the kernel lists no NAPIs (before 6.8):
// the threads of a device are those whose names come up when it is switched
// on. Many containers have an eth0, so that of a device which is on already the
// journal has to tell: those that were moved in the same owner's name.
func (is *Isolator) threadedByName(knob journal.Knob, device string, id container.ID) ([]sched.Thread, error) {
	if value, err := knob.Read(); err != nil {
		return nil, err
	} else if value == "1" {
		// It may be of another one in the namespace, which has ended since.
		owner := id
		if e, ok := is.cfg.Journal.Entry(knob.Ref()); ok && e.Owner.Feature == is.cfg.Feature {
			owner = container.ID(e.Owner.Container)
		}
		threads, err := is.moved(device, owner)
		if err == nil && len(threads) > 0 {
			err = is.turn(knob, "1", id) // which is the owner from now on
		}
		if err != nil || len(threads) > 0 {
			return threads, err
		}
		// Not by us: a thread that an older kernel has kept does not come up.
		if err := is.turn(knob, "0", id); err != nil {
			return nil, err
		}
	}
	before, err := is.pollers(device)
	if err != nil {
		return nil, err
	}
	if err := is.turn(knob, "1", id); err != nil {
		return nil, err
	}
	// The threads exist when the write returns; their names are set by
	// themselves as they first run, which on a busy CPU may take a while.
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		after, err := is.pollers(device)
		if err != nil {
			return nil, err
		}
		var threads []sched.Thread
		for _, t := range after {
			if !slices.Contains(before, t) {
				threads = append(threads, t.Thread)
			}
		}
		if len(threads) > 0 {
			return threads, nil
		}
		waited := time.Since(began)
		if waited < keptWait {
			continue
		}
		// An older kernel keeps a device's threads while it does not poll by them
		// (net/core/dev.c, dev_set_threaded): then they are among those that were
		// there, and nobody has placed them. One more that idles does no harm.
		placed := is.placed(func(journal.Entry) bool { return true })
		var kept []sched.Thread
		for _, t := range before {
			if !placed[strconv.Itoa(t.TID)] {
				kept = append(kept, t.Thread)
			}
		}
		if len(kept) > 0 {
			return kept, nil
		}
		if waited > namedWait {
			return nil, fmt.Errorf("no thread napi/%s-N came up within %v", device, namedWait)
		}
	}
}

// placed gives the threads that were moved, of those entries of the journal.
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

// pollers lists the threads that poll devices of this name, in whatever namespace.
func (is *Isolator) pollers(device string) ([]sched.Named, error) {
	prefix := "napi/" + device + "-"
	list, err := sched.Threads(is.cfg.Roots.Proc, prefix)
	return slices.DeleteFunc(list, func(t sched.Named) bool { return !pollsFor(t.Comm, prefix) }), err
}

// pollsFor says whether a thread that Threads found by "napi/DEVICE-" is one of
// that device, and not of another whose name goes on: of eth0-1, say, which any
// container may call one of its own. What follows the device is a number.
func pollsFor(comm, prefix string) bool {
	number, whole := strings.CutPrefix(comm, prefix)
	if !whole || number == "" {
		return true // cut off by the kernel before it can be told
	}
	return strings.Trim(number, "0123456789") == ""
}

// moved lists those of them that were moved for a container.
func (is *Isolator) moved(device string, id container.ID) ([]sched.Thread, error) {
	ours := is.placed(func(e journal.Entry) bool { return e.Owner.Container == uint64(id) })
	list, err := is.pollers(device)
	if err != nil {
		return nil, err
	}
	var threads []sched.Thread
	for _, t := range list {
		if ours[strconv.Itoa(t.TID)] {
			threads = append(threads, t.Thread)
		}
	}
	return threads, nil
}

// place moves a kernel thread into the container's cgroup of the cpu
// controller and, where that is another hierarchy, into its cpuset, so that the
// thread goes on following it when the owner changes it.
func (is *Isolator) place(t sched.Thread, group, cpuset string, id container.ID) error {
	if err := is.move(t, is.cfg.Layout.CPU, group, id); err != nil {
		return err
	}
	if cpuset == "" || is.cfg.Layout.CPUSet == is.cfg.Layout.CPU {
		return nil
	}
	return is.move(t, is.cfg.Layout.CPUSet, cpuset, id)
}

// move moves a kernel thread within one hierarchy.
func (is *Isolator) move(t sched.Thread, hierarchy, group string, id container.ID) error {
	return is.turn(sched.Group(is.cfg.Roots.Proc, is.cfg.Layout, t, hierarchy), group, id)
}

// pollSlice is the slice of a thread that polls: the shortest that the kernel
// has. The thread then gets its turn before what is in its queue has grown
// old, or has kept a sender on this host waiting; its share of the CPU is what
// it was. MEASURED.md has the measurement.
const pollSlice = 100 * time.Microsecond

// hasten gives a thread pollSlice, where the kernel can.
func (is *Isolator) hasten(t sched.Thread, id container.ID) error {
	knob := sched.Slice(is.cfg.Roots.Proc, t)
	if value, err := knob.Read(); err != nil || value == sched.NoSlice {
		return err
	}
	return is.turn(knob, sched.FormatSlice(pollSlice), id)
}
