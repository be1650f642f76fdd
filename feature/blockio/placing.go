package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
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
	cpus    []int // that serve it, or would serve it without us
	moved   []int // the CPUs that we gave it; nil: none
	count   uint64
	movable bool
	held    string // the reason why we cannot move it; "" if we can
}

// The reasons why we cannot move an interrupt, each with its remedy.
const (
	byHand      = "somebody has chosen the CPUs of interrupts %s of %s, which serve disks: give them others, or all (%s), in /proc/irq/N/smp_affinity_list"
	byBalancing = "irqbalance places interrupts %s of %s, and disks are served by the same CPUs: stop it, or start it with --banirq for each and give them all CPUs (%s)"
)

// seldom separates data interrupts from others, such as those for configuration: an interrupt is for
// data if its count reaches this part of the count of the device's most frequent one.
const seldom = 0.01

// forData reports whether one of a device's interrupts is for data.
func (d device) forData(of interrupt) bool {
	most := uint64(0)
	for _, i := range d.irqs {
		most = max(most, i.count)
	}
	return float64(of.count) >= seldom*float64(most)
}

// serving lists the CPUs that serve a device's data interrupts.
func (d device) serving() (cpus []int) {
	for _, i := range d.irqs {
		if d.forData(i) {
			cpus = append(cpus, i.cpus...)
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus)
}

// move is an interrupt and its new CPUs.
type move struct {
	irq  int
	cpus []int
}

// placing is a plan for the CPUs of network work.
type placing struct {
	moves []move
	steer []string // devices whose interrupts cannot be moved: what follows the interrupt moves to
	cpus  []int    // that serve no disk
}

// separate plans disjoint CPUs for disks and networks. A network interrupt on a CPU that serves a disk
// moves to one of the other usable CPUs, in turn. The rest stay where they are, so that the queues of a
// device keep their spread. If an interrupt cannot be moved, the work that follows it moves. ends are
// virtual devices, and the CPU that sends their packets receives them. The error says which part is
// impossible, and why.
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
			at := i.cpus
			if i.moved != nil {
				at = i.moved
			}
			for _, cpu := range at {
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

// steer moves a network device's work to cpus, where an interrupt or, for a veth, the sender brings its
// packets to other CPUs. The threads that poll the device run on cpus or, without threads, its receive
// queues hand their packets to cpus (RPS). The part before that, the driver's or the sender's, stays
// where it is. XPS stays as it is: it chooses the queue that a CPU sends by, not the CPU of the
// device's interrupts. steer keeps settings of others, and left lists them.
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
		if err := turn(knob, value); err != nil { // a kernel may refuse isolated CPUs, say
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

// pollers returns the threads that poll a device. It does not go by thread names, because a container
// may name its device at will.
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

// elses reports whether another feature has a claim on a knob, or the journal has the knob and the
// value is not ours.
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

// devices reads the named devices of a sysfs class, and leaves out those without interrupts.
func (f *BlockIO) devices(class string, names []string) (out []device, err error) {
	roots := f.cfg.Roots
	for _, name := range names {
		irqs, err := irq.Of(roots.Sys, filepath.Join(roots.Sys, class, name))
		if err != nil {
			return nil, err
		}
		d := device{name: name}
		for _, n := range irqs {
			cpus, err := irq.CPUs(roots.Proc, n)
			if errors.Is(err, journal.ErrGone) {
				continue
			}
			if err != nil {
				return nil, err
			}
			d.irqs = append(d.irqs, interrupt{number: n, cpus: cpus, count: irq.Count(roots.Sys, n)})
		}
		if len(d.irqs) > 0 {
			out = append(out, d)
		}
	}
	return out, nil
}

// movable finds out which interrupts of devices can be moved, which we have moved, and which an
// administrator or irqbalance has placed.
func (f *BlockIO) movable(devices []device) error {
	proc := f.cfg.Roots.Proc
	balancer, err := irq.Balancing(proc)
	if err != nil {
		return err
	}
	for _, d := range devices {
		for n := range d.irqs {
			i := &d.irqs[n]
			knob := irq.Affinity(proc, i.number)
			now, err := knob.Read()
			var chosen bool
			if err == nil {
				i.movable = irq.Movable(proc, i.number)
				chosen, err = irq.Chosen(proc, f.cfg.Roots.Sys, i.number)
			}
			if err := ignoreGone(err); err != nil {
				return err
			}
			e, noted := f.cfg.Journal.Entry(knob.Ref(), name)
			switch {
			case noted && e.Ours(now):
				was, err := cgroup.ParseCPUs(e.Before)
				if err != nil {
					return err
				}
				if i.moved, err = cgroup.ParseCPUs(now); err != nil {
					return err
				}
				i.cpus = was
			case balancer.Places(i.number):
				i.held = byBalancing
			case chosen:
				i.held = byHand
			}
		}
	}
	return nil
}

// serving reads the disks of a container's reservations, each with the interrupts that complete the
// container's requests, and the names of disks behind the network. The kernel spreads the interrupts of
// a disk with a queue for each CPU, or for several: those of CPUs outside the container's cpuset serve
// others.
func (f *BlockIO) serving(m *managed) (disks []device, remote []string, err error) {
	cpus, _ := cgroup.CPUs(m.target.Container.Cgroup.CPUSet) // without a cpuset: nil, which is all
	proc := f.cfg.Roots.Proc
	for _, r := range m.reserved {
		found, err := f.devices("block", []string{r.disk.Name})
		if err != nil {
			return nil, nil, err
		}
		if len(found) == 0 {
			remote = append(remote, r.disk.Name)
		}
		for _, d := range found {
			d.irqs = slices.DeleteFunc(d.irqs, func(i interrupt) bool {
				text, err := irq.Affinity(proc, i.number).Read()
				queue, perr := cgroup.ParseCPUs(text)
				alien := cpus != nil && err == nil && perr == nil && !slices.ContainsFunc(queue, func(cpu int) bool { return slices.Contains(cpus, cpu) })
				return alien && !irq.Movable(proc, i.number)
			})
			disks = append(disks, d)
		}
	}
	return disks, remote, nil
}

// carriers returns the network devices that lead to a disk behind the network: the hardware below
// bonds, VLANs and bridges. The error says why they are not known.
func (f *BlockIO) carriers(disk string) (names []string, err error) {
	r, ok := block.FindRemote(f.cfg.Roots.Sys, disk)
	if ok && len(r.Paths) == 0 {
		return nil, fmt.Errorf("%s is behind the network (%s), and the kernel does not say over which device: "+
			"keep other interrupts off its CPUs by hand, in /proc/irq/N/smp_affinity_list", disk, r.Transport)
	}
	for _, path := range r.Paths {
		by := 0
		if path.Device != "" {
			if by, err = f.net.Index(path.Device); err != nil {
				return nil, fmt.Errorf("%s: %w", disk, err)
			}
		}
		toward, err := f.net.RouteTo(path.To, path.From, by)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", disk, err)
		}
		l, err := f.net.Link(toward[0])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", disk, err)
		}
		names = append(names, f.hardware(l.Name, 0)...)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// maxStacked bounds how many devices lie above each other: the kernel's own bound
// (MAX_NEST_DEV).
const maxStacked = 8

// hardware lists the devices at the bottom of a network device.
func (f *BlockIO) hardware(device string, depth int) (names []string) {
	lower, _ := filepath.Glob(filepath.Join(f.cfg.Roots.Sys, "class/net", device, "lower_*"))
	if len(lower) == 0 || depth == maxStacked {
		return []string{device}
	}
	for _, path := range lower {
		names = append(names, f.hardware(strings.TrimPrefix(filepath.Base(path), "lower_"), depth+1)...)
	}
	return names
}
