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

// This file makes plans from the state that look.go has read, without access to the host.

// polling plans the settings that make each packet of a device pass the device's own NAPI. The method
// threads then makes threads poll it.
//
// The packets of a veth do so only if GRO is on at the receiving end and TSO off at the sending end
// (veth.c: veth_gro_requested, veth_skb_is_eligible_for_gro). RPS and RFS would pass them to a softirq.
//
// For super-packets TSO keeps its earlier value, which may be on, partly on or off: see setShape.
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

// steered returns the union of the CPUs in the operator's RPS masks of all receive queues. It returns
// none if RPS is off for a queue, because that queue runs on the CPU of its interrupt.
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
	group  string // cgroup of the cpu controller
	child  bool   // group is one of ours, and may have to be made
	cpuset string // cgroup of the cpuset controller, so that its owner's changes apply; "": none
	nice   string // nice value among the tasks of the group; "": unchanged

	// cpus are the CPUs of the operator's RPS, which is off while threads poll: the threads stay on
	// these CPUs instead. If there are none, or all are offline, which RPS ignores, the threads may use
	// all CPUs.
	cpus []int
}

// making plans a cgroup for threads.
//
// On v2 it freezes the cgroup before threads enter, which does not stop kernel threads. The cgroup
// then counts as frozen. A cgroup that holds kernel threads never becomes frozen when its parent is
// frozen later (kernel/cgroup/freezer.c, cgroup_update_frozen). Nor does the parent, if its processes
// are in children too, as with a systemd or an engine in a container: docker pause would wait in
// vain.
func making(group string, l cgroup.Layout) []journal.Setting {
	plan := []journal.Setting{{Knob: cgroup.Group(group), Value: cgroup.Present}}
	if l.CPU == l.V2 {
		plan = append(plan, journal.Setting{Knob: cgroup.File(filepath.Join(group, "cgroup.freeze")), Value: "1"})
	}
	return plan
}

// pollSlice is the time slice of a thread that polls, the kernel's shortest. The thread then runs
// before packets in its queue are old or delay a sender on this host. Its share of the CPU is the
// same. docs/measured.md has the measurement.
const pollSlice = 100 * time.Microsecond

// pacing plans the time slice and the nice value of a thread. slice is the present slice, which shows
// whether the kernel supports slices. nice is the wanted nice value; "" leaves it unchanged.
func pacing(proc string, t sched.Thread, slice, nice string) (plan []journal.Setting) {
	if slice != sched.NoSlice {
		plan = append(plan, journal.Setting{Knob: sched.Slice(proc, t), Value: sched.FormatSlice(pollSlice)})
	}
	if nice != "" {
		plan = append(plan, journal.Setting{Knob: sched.Nice(proc, t), Value: nice})
	}
	return plan
}

// placing plans the move of a thread to the cgroups of its place.
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

// steering plans to keep a thread, which may run on the CPUs in may, on those that are also in cpus.
func steering(affinity journal.Knob, may, cpus []int) []journal.Setting {
	want := slices.DeleteFunc(slices.Clone(cpus), func(c int) bool { return !slices.Contains(may, c) })
	if len(want) == 0 || len(want) == len(may) {
		return nil
	}
	return []journal.Setting{{Knob: affinity, Value: cgroup.FormatCPUs(want)}}
}

// usualShares is the default weight of a cgroup in units of cpu.shares, which all weights here use
// (kernel/sched/core.c).
const usualShares = 1024

// pays returns the cgroup that pays for threads at a place.
func (at place) pays() string {
	if at.child {
		return filepath.Dir(at.group)
	}
	return at.group
}
