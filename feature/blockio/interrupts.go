package blockio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// interruptsKey is decided about where policy says auto.
const interruptsKey = "fairlead.io.interrupts"

// device is something with interrupts.
type device struct {
	name string
	irqs []interrupt
}

type interrupt struct {
	number  int
	cpus    []int // that serve it
	count   uint64
	movable bool
}

// devices reads those below a class of sysfs that have interrupts.
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
			d.irqs = append(d.irqs, interrupt{n, cpus, irq.Count(roots.Sys, n), class != "block" && irq.Movable(roots.Proc, n)})
		}
		if len(d.irqs) > 0 {
			out = append(out, d)
		}
	}
	return out, nil
}

// seldom is the part of a device's most frequent interrupt below which another is one for
// its configuration, say, and not for its data.
const seldom = 0.01

// forData says whether one of a device's interrupts is for data.
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

// separate plans disjoint CPUs: the interrupts of networks that can be moved go to the CPUs
// that serve no disk. Where one cannot be moved from a disk's CPU, what follows it is. The
// ends are virtual devices, whose packets are received by the CPU that sent them. The error
// says why all that cannot be.
func separate(disks, networks []device, ends []string, online []int) (p placing, err error) {
	var taken []int
	for _, d := range disks {
		taken = append(taken, d.serving()...)
	}
	if len(taken) == 0 {
		return p, errors.New("no disk of its reservations has interrupts of its own")
	}
	p.cpus = slices.DeleteFunc(slices.Clone(online), func(cpu int) bool { return slices.Contains(taken, cpu) })
	if len(p.cpus) == 0 {
		return p, fmt.Errorf("the disks are served by all CPUs (%s): none is left for the network", cgroup.FormatCPUs(online))
	}
	for _, d := range networks {
		for _, i := range d.irqs {
			switch {
			case i.movable:
				p.moves = append(p.moves, move{i.number, p.cpus})
			case d.forData(i) && slices.ContainsFunc(i.cpus, func(cpu int) bool { return slices.Contains(taken, cpu) }) && !slices.Contains(p.steer, d.name):
				p.steer = append(p.steer, d.name)
			}
		}
	}
	p.steer = append(p.steer, ends...)
	if len(p.moves) == 0 && len(p.steer) == 0 {
		err = errors.New("no network device of this host has interrupts of its own, and no container a veth to it")
	}
	return p, err
}

// interrupts brings the host to what all members ask for: their owner is the host as a
// whole, as the interrupts of a disk serve everybody. The error is about t alone, and says
// what of it cannot be had.
func (f *BlockIO) interrupts(t policy.Target) error {
	var disks []string
	var expiries []time.Time
	for _, m := range f.members {
		if m.target.Settings.Interrupts != policy.InterruptsApart {
			continue
		}
		expiries = append(expiries, m.target.Expiry)
		for _, r := range m.reserved {
			disks = append(disks, r.disk.Name)
		}
	}
	slices.Sort(disks)
	var partly error
	wanted := make(map[journal.Ref]bool)
	by := journal.Owner{Feature: name}
	turn := func(knob journal.Knob, value string) error {
		wanted[knob.Ref()] = true
		return ignoreGone(f.cfg.Journal.TurnUntil(knob, value, by, lastExpiry(expiries)))
	}
	steer := func(devices []string, cpus []int) (errs []error) {
		for _, dev := range devices {
			left, err := f.steer(dev, cpus, turn)
			errs, partly = append(errs, err), errors.Join(partly, left)
		}
		return errs
	}
	asks := t.Settings.Interrupts == policy.InterruptsApart
	if m := f.members[t.Container.ID]; m != nil {
		if !asks && !m.apart { // the rest of the host stays as it is for the others' sake
			if len(f.spare) == 0 {
				return nil
			}
			return errors.Join(steer(f.hostEnds(t.Container), f.spare)...)
		}
		m.apart = asks
	}
	p, partly, err := f.apart(slices.Compact(disks), len(expiries) > 0)
	if err != nil {
		return err
	}
	f.spare = p.cpus
	var errs []error
	for _, m := range p.moves {
		errs = append(errs, turn(irq.Affinity(f.cfg.Roots.Proc, m.irq), cgroup.FormatCPUs(m.cpus)))
	}
	errs = append(errs, steer(p.steer, p.cpus)...)
	placed := []string{irq.KindIRQ, netdev.KindRPS, sched.KindAffinity}
	errs = append(errs, f.restore(func(e journal.Entry) bool {
		return e.Owner == by && slices.Contains(placed, e.Ref.Kind) && !wanted[e.Ref]
	}))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if partly != nil && asks {
		return fmt.Errorf("%w: io.interrupts: %w", feature.ErrPartly, partly)
	}
	return nil
}

// hostEnds are the other ends of a container's veths in this namespace.
func (f *BlockIO) hostEnds(c container.Container) (names []string) {
	for _, i := range c.Interfaces {
		if i.HasHostEnd() && f.net != nil && i.Host.NetNS == f.net.Inode() {
			names = append(names, i.Host.Name)
		}
	}
	return names
}

// apart plans for these disks. partly is why it is not, or not all, to be had.
func (f *BlockIO) apart(names []string, asked bool) (p placing, partly, err error) {
	if !asked {
		return p, nil, nil
	}
	if f.net == nil {
		if f.net, err = netdev.Open(filepath.Join(f.cfg.Roots.Proc, "self/ns/net")); err != nil {
			return p, nil, err
		}
	}
	balanced, err := irq.Balanced(f.cfg.Roots.Proc)
	if err != nil {
		return p, nil, err
	}
	if balanced {
		return p, errors.New("irqbalance places the interrupts of this host: stop it, or have it ban those of the network"), nil
	}
	disks, err := f.devices("block", names)
	if err != nil {
		return p, nil, err
	}
	entries, err := os.ReadDir(filepath.Join(f.cfg.Roots.Sys, "class/net"))
	if err != nil {
		return p, nil, err
	}
	var nets []string
	for _, e := range entries {
		nets = append(nets, e.Name())
	}
	networks, err := f.devices("class/net", nets)
	if err != nil {
		return p, nil, err
	}
	text, err := os.ReadFile(filepath.Join(f.cfg.Roots.Sys, "devices/system/cpu/online"))
	if err != nil {
		return p, nil, err
	}
	online, err := cgroup.ParseCPUs(strings.TrimSpace(string(text)))
	if err != nil {
		return p, nil, err
	}
	var ends []string
	for _, m := range f.members {
		ends = append(ends, f.hostEnds(m.target.Container)...)
	}
	slices.Sort(ends) // containers of a pod have the same
	p, partly = separate(disks, networks, slices.Compact(ends), online)
	return p, partly, nil
}

// networkTime says how long, since the last call, the CPUs that serve disks worked for the
// network, by disk; of several CPUs, the busiest counts. It reads nothing unless policy
// leaves it to the agent for somebody.
func (f *BlockIO) networkTime() map[monitor.Disk]time.Duration {
	disks := make(map[string]monitor.Disk)
	for _, m := range f.members {
		if m.interrupts() == policy.InterruptsAuto {
			for _, r := range m.reserved {
				disks[r.disk.Name] = r.at()
			}
		}
	}
	if len(disks) == 0 {
		f.works = nil
		return nil
	}
	before := f.works
	now, err := irq.Works(f.cfg.Roots.Proc)
	if f.works = now; err != nil || before == nil {
		return nil
	}
	out := make(map[monitor.Disk]time.Duration)
	for diskName, at := range disks {
		found, err := f.devices("block", []string{diskName})
		if err != nil {
			continue
		}
		for _, d := range found {
			for _, cpu := range d.serving() {
				out[at] = max(out[at], now[cpu].ForNetwork(before[cpu]))
			}
		}
	}
	return out
}

// interrupts is what policy says, decisions apart.
func (m *member) interrupts() policy.Interrupts {
	for _, o := range m.target.Origins {
		if o.Key == interruptsKey && o.Instead != "" {
			return policy.InterruptsAuto
		}
	}
	return m.target.Settings.Interrupts
}

// separateFor keeps the network's interrupts apart for the sake of a reservation.
func (c *Control) separateFor(w Window, d Demand) {
	if d.Interrupts != policy.InterruptsAuto {
		return
	}
	a := c.act(w, d.Container)
	if a.Apart {
		return
	}
	a.Apart = true
	why := fmt.Sprintf("the network took %s in each second of a CPU that serves %s; %s", perSecond(w.Network[d.Disk], w), d.Disk, d.shortfall())
	c.did(w, d, d.Container, a, why, "interrupts=apart")
}
