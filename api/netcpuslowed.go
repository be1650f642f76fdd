package api

import (
	"maps"
	"slices"
)

// slowed returns a function that fills in what a container lost of its CPU time since an earlier
// report: to packets of others, and while it waited for a CPU. Either report may be nil.
func (n *NetCPU) slowed(before *NetCPU) func(*OverviewRow) losses {
	if n == nil || before == nil {
		return func(*OverviewRow) losses { return nil }
	}
	d := n.After(*before)
	span := d.Taken.Sub(d.Since).Seconds()
	accounts, ran := make(map[ID]NetCPUAccount, len(d.Accounts)), d.ran()
	for _, a := range d.Accounts {
		accounts[a.Container] = a
	}
	return func(row *OverviewRow) (l losses) {
		a, known := accounts[row.Container]
		if !known || span <= 0 {
			return nil
		}
		row.CPU, row.NetworkCPU = a.Tasks/span, a.Network()/span
		for _, w := range a.Work {
			rate := &row.Ingress
			if w.Direction == "send" {
				rate = &row.Egress
			}
			rate.Achieved += 8 * float64(w.Bytes) / span
		}
		stolen, waited, second := a.lost(span)
		for _, c := range a.StolenBy {
			l = append(l, Slowdown{SlowedByPackets, stolen * second * c.Seconds / a.Stolen, c.Container, c.Name})
		}
		return append(l, ran.during(a, waited, second)...)
	}
}

// lost returns the CPU time that a container lost in span seconds: to packets in the time of its
// tasks, and by waiting for a CPU; and the part of its speed that a second is. docs/slowed.md
// derives them.
func (a NetCPUAccount) lost(span float64) (stolen, waited, second float64) {
	took := min(a.Stolen, a.Tasks) // an estimate while packets are sampled
	did, active, wait := a.Tasks-took, a.Tasks+a.Throttled, 0.0
	if a.WaitedCPUs != nil {
		active, wait = a.Active, max(*a.WaitedCPUs-a.Throttled, 0)
	}
	most := took + wait
	if quota := a.Quota; quota > 0 {
		if a.Ledger != nil && a.Ledger.Factor > 1 {
			quota /= a.Ledger.Factor // what is above is compensation
		}
		most = min(most, max(quota*span-did, 0))
	}
	if did+most <= 0 {
		return 0, 0, 0
	}
	took = min(took, most)
	return took, most - took, min(active/span, 1) / (did + most)
}

// ran is what ran on CPUs that were not idle, in seconds.
type ran struct {
	packets []NetCPUCulprit   // by whose they were
	tasks   map[ID]float64    // of each container, without packets in their time
	stolen  map[[2]ID]float64 // of packets, in the time of a victim's tasks: by victim and culprit
}

func (n NetCPU) ran() ran {
	r := ran{tasks: make(map[ID]float64), stolen: make(map[[2]ID]float64)}
	packets := make(map[ID]NetCPUCulprit)
	count := func(id ID, name string, seconds float64) {
		packets[id] = NetCPUCulprit{id, name, packets[id].Seconds + seconds}
	}
	for _, a := range n.Accounts {
		r.tasks[a.Container] += a.Tasks - a.Own
		count(a.Container, a.Name, a.Own)
	}
	for _, t := range n.Matrix {
		switch t.Kind {
		case VictimTask, VictimNAPI:
			r.tasks[t.Victim] -= t.Seconds
			r.stolen[[2]ID{t.Victim, t.Culprit}] += t.Seconds
			fallthrough
		case VictimKsoftirqd:
			count(t.Culprit, t.CulpritName, t.Seconds)
		}
	}
	delete(r.tasks, 0) // nobody counts those of the host
	for _, id := range slices.Sorted(maps.Keys(packets)) {
		r.packets = append(r.packets, packets[id])
	}
	return r
}

// during divides a loss of a container by waiting among those who ran meanwhile: packets, by whose
// they were, and the tasks of others. Nothing is charged with more than it ran, and the container's
// own packets are no loss.
func (r ran) during(a NetCPUAccount, loss, second float64) (l losses) {
	seconds, all := make([]float64, len(r.packets)), 0.0
	for id, s := range r.tasks {
		if id != a.Container {
			all += max(s, 0)
		}
	}
	for i, c := range r.packets {
		seconds[i] = c.Seconds - r.stolen[[2]ID{a.Container, c.Container}]
		if c.Container == a.Container {
			seconds[i] -= a.Own // it ran then
		}
		seconds[i] = max(seconds[i], 0)
		all += seconds[i]
	}
	left := loss
	for i, c := range r.packets {
		if seconds[i] == 0 {
			continue
		}
		part := min(loss*seconds[i]/all, seconds[i])
		left -= part
		if c.Container != a.Container {
			l = append(l, Slowdown{SlowedByPackets, part * second, c.Container, c.Name})
		}
	}
	return append(l, Slowdown{Cause: SlowedByCPU, Slowed: left * second})
}
