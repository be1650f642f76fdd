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
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// interruptsKey is a key that the agent decides where policy says auto.
const interruptsKey = "fairlead.io.interrupts"

// placed keeps the work of the network off the CPUs that serve disks.
type placed struct {
	net   *netdev.NS       // of this process; nil: not needed yet
	spare []int            // CPUs that serve no disk of a container that is apart
	works map[int]irq.Work // of each CPU at the last window; nil: not read
	moved int              // how many of our settings had been overwritten, at the last window
}

// interrupts brings the host to what all containers ask for. The host as a whole owns the knobs,
// because the interrupts of a disk serve all containers. The error is about of alone, and says which
// part of its request is impossible.
func (f *BlockIO) interrupts(of *managed) error {
	var askers []*managed
	var expiries []time.Time
	for _, m := range f.managed {
		if m.target.Settings.Interrupts == policy.InterruptsApart {
			askers, expiries = append(askers, m), append(expiries, m.target.Until(interruptsKey))
		}
	}
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
	asks := of != nil && of.target.Settings.Interrupts == policy.InterruptsApart
	if of != nil {
		if !asks && !of.apart { // the rest of the host stays as it is for the other containers
			if len(f.spare) > 0 {
				if err := errors.Join(steer(f.hostEnds(of.target.Container), f.spare)...); err != nil {
					return err
				}
			}
			return f.untried(of)
		}
		of.apart = asks
	}
	p, partly, err := f.apart(askers)
	if err != nil {
		return err
	}
	f.spare = p.cpus
	var errs []error
	for _, i := range p.moves {
		errs = append(errs, turn(irq.Affinity(f.cfg.Roots.Proc, i.irq), cgroup.FormatCPUs(i.cpus)))
	}
	errs = append(errs, steer(p.steer, p.cpus)...)
	errs = append(errs, f.restore(func(e journal.Entry) bool { return places(e) && !wanted[e.Ref] }))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if !asks && of != nil {
		return f.untried(of)
	}
	if partly != nil && asks {
		return fmt.Errorf("%w: io.interrupts: %w", feature.ErrPartly, partly)
	}
	return nil
}

// places reports whether an entry keeps network work off the CPUs of disks.
func places(e journal.Entry) bool {
	return e.Owner == journal.Owner{Feature: name} && slices.Contains([]string{irq.KindIRQ, netdev.KindRPS, sched.KindAffinity}, e.Ref.Kind)
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

// untried returns the part of io.interrupts: auto that this host could not do if the network got in the
// way.
func (f *BlockIO) untried(m *managed) error {
	if m.interrupts() != policy.InterruptsAuto || len(m.reserved) == 0 {
		return nil
	}
	_, partly, err := f.apart([]*managed{m})
	if err != nil {
		return err
	}
	for _, r := range m.reserved {
		if remote, ok := block.FindRemote(f.cfg.Roots.Sys, r.disk.Name); ok && partly == nil {
			partly = fmt.Errorf("what the network does for %s (%s) and for others cannot be told apart: say apart in place of auto", r.disk.Name, remote.Transport)
		}
	}
	if partly == nil {
		return nil
	}
	return fmt.Errorf("%w: io.interrupts: %w", feature.ErrPartly, partly)
}

// apart plans for the disks of these containers. partly says why the plan is empty or incomplete.
func (f *BlockIO) apart(askers []*managed) (p placing, partly, err error) {
	if len(askers) == 0 {
		return p, nil, nil
	}
	roots := f.cfg.Roots
	if f.net == nil {
		if f.net, err = netdev.Open(filepath.Join(roots.Proc, "self/ns/net")); err != nil {
			return p, nil, err
		}
	}
	entries, err := os.ReadDir(filepath.Join(roots.Sys, "class/net"))
	if err != nil {
		return p, nil, err
	}
	var nets []string
	for _, e := range entries {
		nets = append(nets, e.Name())
	}
	var disks []device
	var why []error
	var over []string // "sda over eth0"
	for _, m := range askers {
		found, remote, err := f.serving(m)
		if err != nil {
			return p, nil, err
		}
		disks = append(disks, found...)
		for _, disk := range remote {
			// Such a disk is served by the interrupts of its network devices.
			carriers, err := f.carriers(disk)
			if err != nil {
				why = append(why, err)
			}
			if found, err = f.devices("class/net", carriers); err != nil {
				return p, nil, err
			}
			disks = append(disks, found...)
			nets = slices.DeleteFunc(nets, func(name string) bool { return slices.Contains(carriers, name) })
			for _, d := range found {
				over = append(over, disk+" over "+d.name)
			}
			if len(found) == 0 && len(carriers) > 0 {
				why = append(why, fmt.Errorf("%s is reached over %s, which has no interrupts of its own", disk, strings.Join(carriers, ", ")))
			}
		}
	}
	networks, err := f.devices("class/net", nets)
	if err != nil {
		return p, nil, err
	}
	if err := f.movable(networks); err != nil {
		return p, nil, err
	}
	usable, err := irq.Usable(roots.Proc, roots.Sys)
	if err != nil {
		return p, nil, err
	}
	var ends []string
	for _, m := range f.managed {
		ends = append(ends, f.hostEnds(m.target.Container)...)
	}
	slices.Sort(ends) // containers of a pod share host ends
	p, partly = separate(disks, networks, slices.Compact(ends), usable)
	if len(networks) == 0 && len(over) > 0 {
		why = append(why, fmt.Errorf("%s: the network's interrupts serve the disk and all else, and stay where they are; reach the disk over a network device of its own", strings.Join(over, ", ")))
	}
	if len(why) == 0 || len(disks) > 0 && len(networks) > 0 {
		why = append(why, partly)
	}
	return p, errors.Join(why...), nil
}

// networkTime returns how long, since the last call, the CPUs that serve disks worked for the network,
// by disk; of several CPUs, the busiest counts. It reads nothing unless policy leaves the decision to
// the agent for some container.
func (f *BlockIO) networkTime() map[decide.Disk]time.Duration {
	var askers []*managed
	for _, m := range f.managed {
		if m.interrupts() == policy.InterruptsAuto && len(m.reserved) > 0 {
			askers = append(askers, m)
		}
	}
	if len(askers) == 0 {
		f.works = nil
		return nil
	}
	before := f.works
	now, err := irq.Works(f.cfg.Roots.Proc)
	if f.works = now; err != nil || before == nil {
		return nil
	}
	out := make(map[decide.Disk]time.Duration)
	for _, m := range askers {
		disks, _, err := f.serving(m)
		if err != nil {
			continue
		}
		for _, r := range m.reserved {
			for _, d := range disks {
				if d.name != r.disk.Name {
					continue
				}
				for _, cpu := range d.serving() {
					out[r.at()] = max(out[r.at()], now[cpu].ForNetwork(before[cpu]))
				}
			}
		}
	}
	return out
}

// interrupts is the policy, without decisions of the agent.
func (m *managed) interrupts() policy.Interrupts {
	if origin(m.target, interruptsKey).Instead != "" {
		return policy.InterruptsAuto
	}
	return m.target.Settings.Interrupts
}
