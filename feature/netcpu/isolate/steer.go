package isolate

import (
	"slices"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// steered gives the CPUs that the operator has RPS hand the packets of a device
// to, of all its receive queues together; none if RPS is off for one of them, so that its
// packets are worked on where its interrupt is. What stopRPS has done does not
// count: what was there before is in the journal.
func (is *Isolator) steered(ns *netdev.NS, index int) ([]int, error) {
	var all []int
	free := false
	err := eachRPS(ns, index, func(rps journal.Knob, mask string) error {
		if e, ok := is.cfg.Journal.Entry(rps.Ref()); ok && e.Ours(mask) {
			mask = e.Before
		}
		cpus, err := netdev.MaskCPUs(mask)
		all, free = append(all, cpus...), free || len(cpus) == 0
		return err
	})
	if err != nil || free {
		return nil, err
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// steer keeps a thread of an uplink on the CPUs that RPS had its packets worked
// on: RPS is off while threads poll, and without this they would run wherever there
// is room. None leaves it as it is, and so do CPUs all of which are offline, as
// RPS passes over these.
func (is *Isolator) steer(t sched.Thread, cpus []int) error {
	if len(cpus) == 0 {
		return nil
	}
	knob := sched.Affinity(is.cfg.Roots.Proc, t)
	now, err := knob.Read()
	if err != nil {
		return err
	}
	may, err := cgroup.ParseCPUs(now)
	if err != nil {
		return err
	}
	want := slices.DeleteFunc(slices.Clone(cpus), func(c int) bool { return !slices.Contains(may, c) })
	if len(want) == 0 || len(want) == len(may) {
		return nil
	}
	return is.turn(knob, cgroup.FormatCPUs(want), 0)
}

// unsteer undoes that.
func (is *Isolator) unsteer(t sched.Thread) error {
	ref := sched.Affinity(is.cfg.Roots.Proc, t).Ref()
	return is.restore(func(e journal.Entry) bool { return e.Ref == ref })
}
