package isolate

import (
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// This file makes plans from what look.go has read, without access to the host.

// polling makes each packet of a device pass the device's own NAPI. Polling in threads comes later;
// see threads.
//
// A veth does that only if GRO is on at the receiving end and TSO off at the sending one (veth.c:
// veth_gro_requested, veth_skb_is_eligible_for_gro). RPS and RFS would hand the packets on to a softirq.
//
// For super-packets TSO is what it was before, which may have been partly on, or off: see setShape.
func (d device) polling(s shape) (plan []journal.Setting) {
	if d.tso != nil {
		plan = append(plan, journal.Setting{Knob: d.ns.Offload(d.index, netdev.GRO), Value: netdev.GRO.On()})
	}
	for i, q := range d.rps {
		plan = append(plan, journal.Setting{Knob: d.ns.RPS(d.index, i), Value: netdev.CPUMask(nil, q.mask)}, journal.Setting{Knob: d.ns.RFS(d.index, i), Value: "0"})
	}
	if d.tso != nil && s == single {
		plan = append(plan, journal.Setting{Knob: d.tso, Value: netdev.Off})
	}
	return plan
}

// steered returns the CPUs of all receive queues' RPS together, as set by the operator; none if RPS
// is off for one of them, which then works at its interrupt.
func (d device) steered() (all []int, err error) {
	for _, q := range d.rps {
		cpus, err := netdev.MaskCPUs(q.given)
		if err != nil || len(cpus) == 0 {
			return nil, err
		}
		all = append(all, cpus...)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// place is where threads run.
type place struct {
	group  string // of the cpu controller
	child  bool   // group is one of ours, and may have to be made
	cpuset string // of the cpuset controller, to follow its owner's changes; "": none
	nice   string // among the tasks of the group; "" leaves it

	// cpus are the CPUs of RPS, which is off while threads poll; without this they would run
	// anywhere. If there are none, or all are offline, which RPS passes over, the threads may use
	// all CPUs.
	cpus []int
}

// making makes a group for threads.
//
// On v2 it is frozen before threads come, which does not affect kernel threads. But it counts as
// frozen from then on: a group that is frozen only with the one above it, while kernel threads are
// in it, never does (kernel/cgroup/freezer.c, cgroup_update_frozen), and neither does the group
// above, if its own processes are in children too, as with a systemd or an engine in a container. A
// waiter, such as docker pause, would give up.
func making(group string, l cgroup.Layout) []journal.Setting {
	plan := []journal.Setting{{Knob: cgroup.Group(group), Value: cgroup.Present}}
	if l.CPU == l.V2 {
		plan = append(plan, journal.Setting{Knob: cgroup.File(filepath.Join(group, "cgroup.freeze")), Value: "1"})
	}
	return plan
}

// pollSlice is the slice of a thread that polls: the kernel's shortest. The thread then runs before
// packets in its queue are old, or have kept a sender on this host waiting; its share of the CPU is
// the same. docs/measured.md has the measurement.
const pollSlice = 100 * time.Microsecond

// pacing sets how a thread takes its turns. slice is its present value, which shows whether the
// kernel can set it; nice is the wanted value, or "" to leave it.
func pacing(proc string, t sched.Thread, slice, nice string) (plan []journal.Setting) {
	if slice != sched.NoSlice {
		plan = append(plan, journal.Setting{Knob: sched.Slice(proc, t), Value: sched.FormatSlice(pollSlice)})
	}
	if nice != "" {
		plan = append(plan, journal.Setting{Knob: sched.Nice(proc, t), Value: nice})
	}
	return plan
}

// placing moves a thread to its place. steering then chooses among its CPUs.
func placing(proc string, l cgroup.Layout, t sched.Thread, at place) (plan []journal.Setting) {
	if at.child {
		plan = making(at.group, l)
	}
	plan = append(plan, journal.Setting{Knob: sched.Group(proc, l, t, l.CPU), Value: at.group})
	if at.cpuset != "" && l.CPUSet != l.CPU {
		plan = append(plan, journal.Setting{Knob: sched.Group(proc, l, t, l.CPUSet), Value: at.cpuset})
	}
	return plan
}

// steering keeps a thread that may run on the CPUs of may on the ones that are also in cpus.
func steering(affinity journal.Knob, may, cpus []int) []journal.Setting {
	want := slices.DeleteFunc(slices.Clone(cpus), func(c int) bool { return !slices.Contains(may, c) })
	if len(want) == 0 || len(want) == len(may) {
		return nil
	}
	return []journal.Setting{{Knob: affinity, Value: cgroup.FormatCPUs(want)}}
}

// usualShares is the weight of an ordinary group, in the unit of cpu.shares, which weights here use
// (kernel/sched/core.c).
const usualShares = 1024

// pays returns the group that pays for threads at a place.
func (at place) pays() string {
	if at.child {
		return filepath.Dir(at.group)
	}
	return at.group
}
