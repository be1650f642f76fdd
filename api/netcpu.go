package api

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"
)

// NetCPU returns whose packets took whose CPU time: for all containers if ref is "", else for one,
// named as for Explain. [NetCPU.After] turns two readings into a rate.
func (c *Client) NetCPU(ctx context.Context, ref string) (out NetCPU, err error) {
	return out, c.report(ctx, "netcpu", ref, 0, &out)
}

// What the CPU would have run in the time of packet work, in NetCPUTheft.Kind.
const (
	VictimTask      = "task"      // a task that a softirq interrupted
	VictimNAPI      = "napi"      // a thread that polls devices
	VictimKsoftirqd = "ksoftirqd" // the kernel's thread for deferred softirqs
	VictimIdle      = "idle"      // none: the CPU was idle
	VictimPeer      = "peer"      // the task that had sent the packets itself, so it is no loss
)

// NetCPU says whose packets took whose CPU time. All its numbers are totals over the time from
// Since to Taken.
type NetCPU struct {
	Since    time.Time       `json:"since" doc:"when counting began; another value than before means that it began anew"`
	Taken    time.Time       `json:"taken" doc:"when the counters were read"`
	Softirq  float64         `json:"softirq_seconds" doc:"CPU time of packet work in softirqs, in seconds; an estimate while a CPU is so busy that it is sampled"`
	Thread   float64         `json:"thread_seconds" doc:"CPU time of packet work in NAPI threads, from the first packet of each poll on, in seconds; an estimate likewise"`
	Charged  float64         `json:"charged_seconds" doc:"CPU time in all accounts, including those of the system and of ended containers, in seconds; if this is close to softirq_seconds + thread_seconds, no time is lost or charged twice"`
	Lost     uint64          `json:"lost_events" doc:"charges of which a full table could not note whose time they took"`
	System   NetCPUAccount   `json:"system" doc:"the account of the packets that are known to belong to no container"`
	Accounts []NetCPUAccount `json:"accounts" doc:"one element for each container that runs or ended a moment ago; the one with the most network CPU time first"`
	Matrix   []NetCPUTheft   `json:"matrix" doc:"whose packets ran in whose time, without what ran in time of their own; largest first"`
	Uplinks  []NetCPUUplink  `json:"uplinks,omitempty" doc:"the devices at which packets are dropped now if their container has no budget or no room left; absent while no container is isolated or charged"`
}

// NetCPUUplink says where packets are dropped at one uplink.
type NetCPUUplink struct {
	Device  string `json:"device" doc:"name of the device"`
	NetNS   uint64 `json:"netns,omitempty" doc:"inode of the device's network namespace"`
	DropsBy string `json:"drops_by,omitempty" doc:"xdp (in the driver) or tc (at the ingress hook); absent: --netcpu-xdp names the device, but it brings no packets of such containers"`
	Why     string `json:"why,omitempty" doc:"why not by xdp where the agent was told to (--netcpu-xdp); with xdp: why a change of the device could not be followed"`
}

// NetCPUAccount is the cost of one container's packets, and the time that it lost to packets of
// others.
type NetCPUAccount struct {
	Container    ID              `json:"container,omitempty,string" doc:"id of the container; absent for the system"`
	Name         string          `json:"name,omitempty" doc:"name of the container; absent if it is no longer known"`
	Ended        bool            `json:"ended,omitempty" doc:"the container no longer runs"`
	Tasks        float64         `json:"tasks_seconds,omitempty" doc:"CPU time that the container's control group was charged for, in seconds, including stolen_seconds; absent if unknown"`
	Throttled    float64         `json:"throttled_seconds,omitempty" doc:"time for which the container's own quota kept its tasks from a CPU, summed over the CPUs, in seconds"`
	Periods      uint64          `json:"throttled_periods,omitempty" doc:"periods of the quota in which that happened"`
	Waited       *float64        `json:"waited_seconds,omitempty" doc:"time in which tasks of the container waited for a CPU while none of them ran, for their turn or for their quota, in seconds; absent where the kernel does not count that (PSI)"`
	WaitedCPUs   *float64        `json:"waited_cpus_seconds,omitempty" doc:"the same summed over the CPUs: an estimate from waited_seconds and what its threads waited, in seconds, counted since the agent saw it first; absent where waited_seconds is"`
	Active       float64         `json:"active_seconds,omitempty" doc:"likewise: time in which the container had something to do, with a CPU or in wait of one, in seconds"`
	Quota        float64         `json:"quota_cpus,omitempty" doc:"the quota of its control group now, in CPUs; absent without one"`
	Receive      float64         `json:"receive_seconds" doc:"CPU time of softirqs and NAPI threads for packets to the container, in seconds"`
	Send         float64         `json:"send_seconds" doc:"CPU time of softirqs and NAPI threads for packets from the container, in seconds; the work of its tasks in system calls is in tasks_seconds"`
	Own          float64         `json:"own_seconds" doc:"the part of receive_seconds and send_seconds that ran in the time of the container's own tasks and NAPI threads"`
	Stolen       float64         `json:"stolen_seconds" doc:"time of the container's tasks and NAPI threads that went into the packets of others, in seconds"`
	StolenBy     []NetCPUCulprit `json:"stolen_by,omitempty" doc:"by whom, most first"`
	Taken        float64         `json:"taken_seconds" doc:"time of other containers, and of tasks of the host, that went into the container's packets, in seconds"`
	Work         []NetCPUWork    `json:"work,omitempty" doc:"the container's packets by direction and protocol"`
	Dropped      uint64          `json:"dropped_packets,omitempty" doc:"packets for the container that were dropped before its queue, because that was full or its quota was used up; counted since its mode is in force"`
	QuotaDropped uint64          `json:"quota_dropped_packets,omitempty" doc:"those of the dropped packets that were dropped because the quota was used up"`
	Ledger       *NetCPULedger   `json:"ledger,omitempty" doc:"debt and credit in the mode charge; one container of a pod has those of the whole pod"`
}

// NetCPULedger is the account by which a container is charged, since its mode came into force.
type NetCPULedger struct {
	Balance  float64 `json:"balance_seconds" doc:"CPU time that the container is owed now, in seconds; negative: that it owes"`
	Factor   float64 `json:"limit_factor" doc:"quota in force, or weight without a quota, as a part of what the owner has set"`
	Charged  float64 `json:"charged_seconds" doc:"CPU time of the container's packets in the time of others, in seconds"`
	Credited float64 `json:"credited_seconds" doc:"CPU time of the container that went into the packets of others, in seconds"`
	Forgiven float64 `json:"forgiven_seconds" doc:"debt that was too much to be repaid, in seconds"`
}

// NetCPUCulprit is a container, and the CPU time that its packets took.
type NetCPUCulprit struct {
	Container ID      `json:"container,omitempty,string" doc:"id of the container whose packets it were; absent for the system"`
	Name      string  `json:"name,omitempty" doc:"name of the container; absent if unknown"`
	Seconds   float64 `json:"cpu_seconds" doc:"CPU time, in seconds"`
}

// NetCPUWork is the work for packets of one kind.
type NetCPUWork struct {
	Direction string  `json:"direction" doc:"receive or send"`
	Protocol  string  `json:"protocol" doc:"udp, tcp, encapsulated (a tunnel's outer packets) or other"`
	Seconds   float64 `json:"cpu_seconds" doc:"CPU time, in seconds"`
	Packets   uint64  `json:"packets" doc:"packets"`
	Bytes     uint64  `json:"bytes" doc:"bytes"`
	Each      float64 `json:"packet_nanoseconds" doc:"mean CPU time of a packet, in nanoseconds; 0 without packets"`
}

// NetCPUTheft is the CPU time of one victim that one container's packets took.
type NetCPUTheft struct {
	Kind        string  `json:"kind" doc:"whose time it was: task, napi (a thread that polls devices), ksoftirqd, or, as nobody's loss, idle or peer (a task that had sent the packets itself)"`
	Victim      ID      `json:"victim,omitempty,string" doc:"id of the container whose task or thread it was; absent for the host"`
	VictimName  string  `json:"victim_name,omitempty" doc:"name of the container; absent if unknown"`
	Culprit     ID      `json:"culprit,omitempty,string" doc:"id of the container whose packets it were; absent for the system"`
	CulpritName string  `json:"culprit_name,omitempty" doc:"name of the container; absent if unknown"`
	Seconds     float64 `json:"cpu_seconds" doc:"CPU time, in seconds"`
}

// SelfNetCPU is what a container may know about its packets' CPU time. It names no other container,
// and omits what would reveal how busy others are.
type SelfNetCPU struct {
	Since     time.Time    `json:"since" doc:"when counting began"`
	Taken     time.Time    `json:"taken" doc:"when the counters were read"`
	Tasks     float64      `json:"tasks_seconds,omitempty" doc:"CPU time that the control group was charged for, in seconds, with what was stolen; absent if unknown"`
	Throttled float64      `json:"throttled_seconds,omitempty" doc:"time that the own quota kept tasks from a CPU, summed over the CPUs, in seconds"`
	Periods   uint64       `json:"throttled_periods,omitempty" doc:"periods of the own quota in which that happened"`
	Receive   float64      `json:"receive_seconds" doc:"CPU time of receiving packets, in seconds"`
	Send      float64      `json:"send_seconds" doc:"CPU time of sending packets, in seconds; without that of the system calls"`
	Stolen    float64      `json:"stolen_seconds" doc:"time of tasks and NAPI threads that went into the packets of others, in seconds"`
	Work      []NetCPUWork `json:"work,omitempty" doc:"packets by direction and protocol"`
}

// Network returns the CPU time of all the account's packets, in seconds.
func (a NetCPUAccount) Network() float64 { return a.Receive + a.Send }

// Packets counts the account's packets, received and sent.
func (a NetCPUAccount) Packets() (n uint64) {
	for _, w := range a.Work {
		n += w.Packets
	}
	return n
}

// After returns the difference between an earlier reading and this one, which covers the time from
// before.Taken to n.Taken. If the agent has restarted counting in between, it returns n.
func (n NetCPU) After(before NetCPU) NetCPU {
	if !n.Since.Equal(before.Since) || n.Taken.Before(before.Taken) {
		return n
	}
	n.Since = before.Taken
	n.Softirq = less(n.Softirq, before.Softirq)
	n.Thread = less(n.Thread, before.Thread)
	n.Charged = less(n.Charged, before.Charged)
	n.Lost = less(n.Lost, before.Lost)
	n.System = n.System.after(before.System)
	n.Accounts = since(n.Accounts, before.Accounts, func(a NetCPUAccount) ID { return a.Container }, NetCPUAccount.after)
	n.Accounts = slices.DeleteFunc(n.Accounts, func(a NetCPUAccount) bool {
		return a.Ended && a.Network() == 0 && a.Stolen == 0
	})
	SortNetCPU(n.Accounts)

	type pair struct {
		kind            string
		victim, culprit ID
	}
	n.Matrix = since(n.Matrix, before.Matrix, func(t NetCPUTheft) pair { return pair{t.Kind, t.Victim, t.Culprit} }, func(t, was NetCPUTheft) NetCPUTheft {
		t.Seconds = less(t.Seconds, was.Seconds)
		return t
	})
	n.Matrix = slices.DeleteFunc(n.Matrix, func(t NetCPUTheft) bool { return t.Seconds == 0 })
	slices.SortStableFunc(n.Matrix, func(x, y NetCPUTheft) int { return cmp.Compare(y.Seconds, x.Seconds) })
	return n
}

// SortNetCPU sorts accounts by network CPU time, the largest first, and then by name.
func SortNetCPU(accounts []NetCPUAccount) {
	slices.SortFunc(accounts, func(x, y NetCPUAccount) int {
		return cmp.Or(cmp.Compare(y.Network(), x.Network()), cmp.Compare(x.Name, y.Name), cmp.Compare(x.Container, y.Container))
	})
}

func (a NetCPUAccount) after(before NetCPUAccount) NetCPUAccount {
	a.Tasks = less(a.Tasks, before.Tasks)
	a.Throttled = less(a.Throttled, before.Throttled)
	a.Periods = less(a.Periods, before.Periods)
	a.Waited, a.WaitedCPUs = lessOf(a.Waited, before.Waited), lessOf(a.WaitedCPUs, before.WaitedCPUs)
	a.Active = less(a.Active, before.Active)
	a.Receive = less(a.Receive, before.Receive)
	a.Send = less(a.Send, before.Send)
	a.Own = less(a.Own, before.Own)
	a.Stolen = less(a.Stolen, before.Stolen)
	a.Taken = less(a.Taken, before.Taken)

	a.StolenBy = since(a.StolenBy, before.StolenBy, func(c NetCPUCulprit) ID { return c.Container }, func(c, was NetCPUCulprit) NetCPUCulprit {
		c.Seconds = less(c.Seconds, was.Seconds)
		return c
	})
	a.StolenBy = slices.DeleteFunc(a.StolenBy, func(c NetCPUCulprit) bool { return c.Seconds == 0 })
	slices.SortStableFunc(a.StolenBy, func(x, y NetCPUCulprit) int { return cmp.Compare(y.Seconds, x.Seconds) })

	type kind struct{ direction, protocol string }
	a.Work = since(a.Work, before.Work, func(w NetCPUWork) kind { return kind{w.Direction, w.Protocol} }, func(w, was NetCPUWork) NetCPUWork {
		w.Seconds, w.Packets, w.Bytes = less(w.Seconds, was.Seconds), less(w.Packets, was.Packets), less(w.Bytes, was.Bytes)
		w.Each = 0
		if w.Packets > 0 {
			w.Each = w.Seconds * 1e9 / float64(w.Packets)
		}
		return w
	})
	a.Work = slices.DeleteFunc(a.Work, func(w NetCPUWork) bool { return w.Packets == 0 && w.Seconds == 0 })
	a.Dropped = less(a.Dropped, before.Dropped)
	a.QuotaDropped = less(a.QuotaDropped, before.QuotaDropped)
	if a.Ledger != nil {
		l := *a.Ledger
		if b := before.Ledger; b != nil {
			l.Charged, l.Credited, l.Forgiven = less(l.Charged, b.Charged), less(l.Credited, b.Credited), less(l.Forgiven, b.Forgiven)
		}
		a.Ledger = &l
	}
	return a
}

// slowed returns a function that fills in how much CPU time a container lost since an earlier
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

// lost returns the CPU time that a container lost in span seconds to packets during its tasks, and
// by waiting for a CPU. It also returns the part of its speed that one second is worth.
// docs/slowed.md derives them.
func (a NetCPUAccount) lost(span float64) (stolen, waited, second float64) {
	took := min(a.Stolen, a.Tasks) // Stolen is an estimate while packets are sampled
	did, active, wait := a.Tasks-took, a.Tasks+a.Throttled, 0.0
	if a.WaitedCPUs != nil {
		active, wait = a.Active, max(*a.WaitedCPUs-a.Throttled, 0)
	}
	most := took + wait
	if quota := a.Quota; quota > 0 {
		if a.Ledger != nil && a.Ledger.Factor > 1 {
			quota /= a.Ledger.Factor // anything above 1 is compensation
		}
		most = min(most, max(quota*span-did, 0))
	}
	if did+most <= 0 {
		return 0, 0, 0
	}
	took = min(took, most)
	return took, most - took, min(active/span, 1) / (did + most)
}

// ran is the work of CPUs that were not idle, in seconds.
type ran struct {
	packets []NetCPUCulprit   // by container
	tasks   map[ID]float64    // by container, without packet work that interrupted them
	stolen  map[[2]ID]float64 // packet work during a victim's tasks, by victim and culprit
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
	delete(r.tasks, 0) // the host's tasks are not counted
	for _, id := range slices.Sorted(maps.Keys(packets)) {
		r.packets = append(r.packets, packets[id])
	}
	return r
}

// during divides the loss of a container that waited among the others that ran: by their packets
// and their tasks. It charges none with more than it ran, and the container's own packets are no
// loss.
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
			seconds[i] -= a.Own // its own packets ran during its tasks
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
