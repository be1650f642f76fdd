package blockio

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// steer has a network device's work done by some CPUs where its packets come to others, by an
// interrupt or, of a veth, from whoever sends: the threads that poll it run there, or, without
// threads, its receive queues hand their packets to these (RPS). What precedes that, the driver's
// part or the sender's, stays where it is. XPS is left alone: it says which queue a CPU sends by,
// not where the device's interrupts come. Settings of others stay, and left lists them.
func (f *BlockIO) steer(device string, cpus []int, turn func(journal.Knob, string) error) (left, err error) {
	index, err := f.net.Index(device)
	if errors.Is(err, netdev.ErrNoLink) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	threads, err := f.pollers(index)
	if err != nil {
		return fmt.Errorf("%s: %w", device, err), nil
	}
	var kept []error
	place := func(what string, knob journal.Knob, value string) {
		if err := turn(knob, value); err != nil { // a kernel may refuse CPUs that are isolated, say
			kept = append(kept, fmt.Errorf("%s of %s: %w", what, device, err))
		}
	}
	for _, t := range threads {
		knob := sched.Affinity(f.cfg.Roots.Proc, t)
		now, err := knob.Read()
		switch {
		case errors.Is(err, journal.ErrGone):
		case err != nil:
			return nil, err
		case f.elses(knob.Ref(), now), f.isPlaced(t):
			kept = append(kept, fmt.Errorf("somebody else has placed thread %d of %s", t.TID, device))
		default:
			place("a thread", knob, cgroup.FormatCPUs(cpus))
		}
	}
	if len(threads) > 0 {
		return errors.Join(kept...), nil
	}
	for queue := 0; ; queue++ {
		knob := f.net.RPS(index, queue)
		mask, err := knob.Read()
		if errors.Is(err, journal.ErrGone) {
			return errors.Join(kept...), nil
		}
		if err != nil {
			return nil, err
		}
		if f.elses(knob.Ref(), mask) || len(f.cfg.Journal.Claims(knob.Ref())) == 0 && strings.Trim(mask, "0,") != "" {
			kept = append(kept, fmt.Errorf("queue %d of %s hands its packets to CPUs that somebody else has chosen (rps_cpus)", queue, device))
			continue
		}
		place(fmt.Sprintf("queue %d", queue), knob, netdev.CPUMask(cpus, mask))
	}
}

// pollers are the threads that poll a device. A thread's name does not tell: a container may
// give its device any.
func (f *BlockIO) pollers(index int) (threads []sched.Thread, err error) {
	list, err := f.net.NAPIs(index)
	if errors.Is(err, netdev.ErrNoNAPIList) {
		if threaded, rerr := f.net.Threaded(index).Read(); rerr == nil && threaded == "1" {
			return nil, errors.New("it is polled by threads, which this kernel does not list (6.7 and later do)")
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, n := range list {
		if n.Thread == 0 {
			continue
		}
		t, err := sched.Find(f.cfg.Roots.Proc, n.Thread)
		if errors.Is(err, journal.ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		threads = append(threads, t)
	}
	return threads, nil
}

// elses reports whether another feature has a claim on a knob, or its value is noted and not
// what we wrote.
func (f *BlockIO) elses(ref journal.Ref, value string) bool {
	return slices.ContainsFunc(f.cfg.Journal.Claims(ref), func(e journal.Entry) bool {
		return e.Owner.Feature != name || !e.Ours(value)
	})
}

// isPlaced reports whether another feature has placed a thread: in a cgroup, say.
func (f *BlockIO) isPlaced(t sched.Thread) bool {
	id := fmt.Sprintf("%d:%d", t.TID, t.Start)
	return slices.ContainsFunc(f.cfg.Journal.Entries(), func(e journal.Entry) bool {
		return e.Owner.Feature != name && (e.Ref.Object == id || strings.HasPrefix(e.Ref.Object, id+":"))
	})
}
