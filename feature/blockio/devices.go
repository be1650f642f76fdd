package blockio

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

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
			d.irqs = append(d.irqs, interrupt{number: n, cpus: cpus, count: irq.Count(roots.Sys, n)})
		}
		if len(d.irqs) > 0 {
			out = append(out, d)
		}
	}
	return out, nil
}

// movable finds out which interrupts of devices can be moved, which we have moved, and
// which are others' to move.
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

// serving reads the disks of a container's reservations, each with those of its interrupts that
// come when the container's requests are done, and how those behind the network are reached.
// The kernel spreads the interrupts of a disk with a queue for each CPU, or for several:
// those of CPUs that the container may not use are for others.
func (f *BlockIO) serving(m *managed) (disks []device, remote []string, err error) {
	cpus, _ := cgroup.CPUs(m.target.Container.Cgroup.CPUSet) // none without a cpuset: all
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

// carriers are the network devices over which a disk behind the network is reached: the
// hardware below bonds, VLANs and bridges. The error says why that is not known.
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
