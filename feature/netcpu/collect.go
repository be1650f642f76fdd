package netcpu

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Snapshot implements feature.Feature. Its samples:
//
//	netcpu_isolated               1 for each container whose packets are charged
//	                              to its own cgroup (or that of its pod)
//	netcpu_early_dropped_packets_total  packets for the container that were
//	                              dropped before its queue, as that was full or
//	                              its quota used up
//	netcpu_quota_dropped_packets_total  those of them that the quota stands for
//	netcpu_super_packets          1 while the container gets bulk TCP in
//	                              super-packets, which are not isolated
//	netcpu_balance_seconds        what a charged container is owed; negative,
//	                              what it owes
//	netcpu_charged_seconds_total, netcpu_credited_seconds_total  what its ledger
//	                              has booked, netcpu_forgiven_seconds_total
//	                              what was too much to be repaid
//	netcpu_limit_factor           its quota, or weight without one, in parts of
//	                              the owner's; netcpu_limit_writes_total
//	netcpu_kthread_seconds_total  CPU time of the container's NAPI threads, by
//	                              device; container 0: of the uplinks' threads
func (n *Netcpu) Snapshot() feature.Snapshot {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now()}
	for id := range n.member {
		s.Samples = append(s.Samples, feature.Sample{Container: id, Name: "netcpu_isolated", Value: 1})
	}
	for _, t := range n.tenants {
		s.Samples = n.kthreads(s.Samples, t.owner, t.threads)
		if t.early == nil {
			continue
		}
		if c, err := n.early.read(t.early); err == nil {
			s.Samples = append(s.Samples,
				feature.Sample{Container: t.owner, Name: "netcpu_early_dropped_packets_total", Value: float64(c.Dropped)},
				feature.Sample{Container: t.owner, Name: "netcpu_quota_dropped_packets_total", Value: float64(c.Beyond)},
				feature.Sample{Container: t.owner, Name: "netcpu_super_packets", Value: float64(t.control.shape)})
		}
	}
	if n.guards != nil {
		s.Samples = n.guards.samples(s.Samples)
	}
	if n.charger != nil {
		s.Samples = n.charger.samples(s.Samples)
	}
	if n.host != nil {
		for _, u := range n.host.devices {
			s.Samples = n.kthreads(s.Samples, 0, u.threads)
		}
	}
	return s
}

// Maps implements feature.Mapped.
func (n *Netcpu) Maps() (list []bpf.Usage) {
	n.mu.Lock()
	e := n.early
	n.mu.Unlock()
	if e != nil {
		list = e.object.Usage()
	}
	if n.meter != nil {
		list = append(list, n.meter.Maps()...)
	}
	return list
}

// kthreads appends the time of threads, summed by device. A thread that has
// ended is left out: its device went, and the container with it.
func (n *Netcpu) kthreads(to []feature.Sample, id container.ID, threads []thread) []feature.Sample {
	sum := make(map[string]float64)
	var order []string
	for _, t := range threads {
		sec, err := sched.CPUTime(n.cfg.Roots.Proc, t.TID)
		if err != nil {
			continue
		}
		if _, seen := sum[t.device]; !seen {
			order = append(order, t.device)
		}
		sum[t.device] += sec
	}
	for _, d := range order {
		to = append(to, feature.Sample{Container: id, Name: "netcpu_kthread_seconds_total", Device: d, Value: sum[d]})
	}
	return to
}
