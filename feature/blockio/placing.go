package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// device is something with interrupts.
type device struct {
	name string
	irqs []interrupt
}

type interrupt struct {
	number  int
	cpus    []int // that serve it, or may without us
	moved   []int // the CPUs that we gave it; nil: none
	count   uint64
	movable bool
	held    string // what keeps us from moving it; "" if nothing does
}

// What keeps us from moving an interrupt, and what would mend that.
const (
	byHand      = "somebody has chosen the CPUs of interrupts %s of %s, which serve disks: give them others, or all (%s), in /proc/irq/N/smp_affinity_list"
	byBalancing = "irqbalance places interrupts %s of %s, and disks are served by the same CPUs: stop it, or start it with --banirq for each and give them all CPUs (%s)"
)

// seldom is the part of a device's most frequent interrupt below which another is one for
// its configuration, say, and not for its data.
const seldom = 0.01

// forData reports whether one of a device's interrupts is for data.
func (d device) forData(of interrupt) bool {
	most := uint64(0)
	for _, i := range d.irqs {
		most = max(most, i.count)
	}
	return float64(of.count) >= seldom*float64(most)
}

// serving lists the CPUs to which a device's interrupts for data come.
func (d device) serving() (cpus []int) {
	for _, i := range d.irqs {
		if d.forData(i) {
			cpus = append(cpus, i.cpus...)
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus)
}

// move is an interrupt and the CPUs that it is to have.
type move struct {
	irq  int
	cpus []int
}

// placing is where the work of the network goes.
type placing struct {
	moves []move
	steer []string // devices without interrupts that can be moved: the work that follows goes to
	cpus  []int    // that serve no disk
}

// separate plans disjoint CPUs: the interrupts of networks that come to CPUs that serve a
// disk go to others of those usable, each to one, in turn. The rest stay where they are, so
// that the queues of a device keep their spread. Where an interrupt cannot be moved, what
// follows it is. The ends are virtual devices, whose packets are received by the CPU that
// sent them. The error says what of that cannot be, and why.
func separate(disks, networks []device, ends []string, usable []int) (p placing, err error) {
	var taken []int
	for _, d := range disks {
		taken = append(taken, d.serving()...)
	}
	if len(taken) == 0 {
		return p, errors.New("no disk of its reservations has interrupts of its own")
	}
	meets := func(cpus []int) bool {
		return slices.ContainsFunc(cpus, func(cpu int) bool { return slices.Contains(taken, cpu) })
	}
	p.cpus = slices.DeleteFunc(slices.Clone(usable), func(cpu int) bool { return slices.Contains(taken, cpu) })
	if len(p.cpus) == 0 {
		return p, fmt.Errorf("the disks are served by all CPUs that may be given interrupts (%s): none is left for the network; "+
			"of a disk with a queue for each CPU, only those of the container's cpuset count", cgroup.FormatCPUs(usable))
	}
	served := make(map[int]int) // how many interrupts of networks each CPU has
	for _, d := range networks {
		for _, i := range d.irqs {
			for _, cpu := range i.at() {
				served[cpu]++
			}
		}
	}
	var errs []error
	for _, d := range networks {
		held := make(map[string][]int)
		for _, i := range d.irqs {
			switch {
			case !meets(i.cpus), i.moved == nil && !d.forData(i): // it is not in the way
			case i.moved != nil && !slices.ContainsFunc(i.moved, func(cpu int) bool { return !slices.Contains(p.cpus, cpu) }):
				p.moves = append(p.moves, move{i.number, i.moved})
			case i.held != "":
				held[i.held] = append(held[i.held], i.number)
			case i.movable:
				to := slices.MinFunc(p.cpus, func(a, b int) int { return cmp.Or(served[a]-served[b], a-b) })
				served[to]++
				p.moves = append(p.moves, move{i.number, []int{to}})
			case !slices.Contains(p.steer, d.name):
				p.steer = append(p.steer, d.name)
			}
		}
		for _, why := range []string{byHand, byBalancing} {
			if len(held[why]) > 0 {
				errs = append(errs, fmt.Errorf(why, cgroup.FormatCPUs(held[why]), d.name, cgroup.FormatCPUs(usable)))
			}
		}
	}
	p.steer = append(p.steer, ends...)
	if len(networks) == 0 && len(ends) == 0 {
		errs = append(errs, errors.New("no network device of this host has interrupts of its own, and no container a veth to it"))
	}
	return p, errors.Join(errs...)
}

// at are the CPUs to which an interrupt comes now.
func (i interrupt) at() []int {
	if i.moved != nil {
		return i.moved
	}
	return i.cpus
}

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
