package netcpu

import (
	"context"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// help says what the samples of Snapshot and Export are. A sample without a
// container is about the host.
var help = map[string]string{
	"netcpu_isolated":                    "1 for a container whose packets are charged to its own cgroup, or to that of its pod.",
	"netcpu_early_dropped_packets_total": "Packets for the container that were dropped before its queue, because that was full or its quota was used up.",
	"netcpu_quota_dropped_packets_total": "Packets for the container that were dropped because its quota was used up.",
	"netcpu_super_packets":               "1 while the container gets bulk TCP in super-packets, which are not isolated.",
	"netcpu_kthread_seconds_total":       "CPU time of the container's NAPI threads; without a container, of the threads of the uplinks.",
	"netcpu_balance_seconds":             "CPU time that a charged container is owed; negative, that it owes.",
	"netcpu_charged_seconds_total":       "CPU time that the container's ledger has charged.",
	"netcpu_credited_seconds_total":      "CPU time that the container's ledger has credited.",
	"netcpu_forgiven_seconds_total":      "Debt of the container that was too much to be repaid.",
	"netcpu_limit_factor":                "Quota of the container, or its weight without one, in parts of what its owner has set.",
	"netcpu_limit_writes_total":          "Changes of the container's quota or weight.",

	"netcpu_tasks_seconds_total":     "CPU time that the container's cgroup was charged for.",
	"netcpu_throttled_seconds_total": "Time for which its own quota kept the container from a CPU.",
	"netcpu_seconds_total":           "CPU time of the container's packets; without a container, of the system's.",
	"netcpu_packets_total":           "The container's packets; without a container, the system's.",
	"netcpu_stolen_seconds_total":    "Time of the container that went into the packets of others.",
	"netcpu_taken_seconds_total":     "Time of others that went into the container's packets.",
	"netcpu_theft_seconds_total":     "CPU time of the culprit's packets that ran in the victim's time; the smallest pairs together are \"other\".",
	"netcpu_measured_seconds_total":  "CPU time of all packet work.",
	"netcpu_system_seconds_total":    "CPU time of packets that belong to no container.",
	"netcpu_lost_events_total":       "Charges whose victim a full table could not note.",
}

// Snapshot implements feature.Feature.
func (n *Netcpu) Snapshot() feature.Snapshot {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now(), Help: help}
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
		for id, packets := range n.guards.dropped() {
			s.Samples = append(s.Samples, feature.Sample{Container: id, Name: "netcpu_quota_dropped_packets_total", Value: float64(packets)})
		}
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

// Report implements feature.Reporter.
func (n *Netcpu) Report(_ context.Context, of *container.Container, _ api.Ask) (any, error) {
	r, err := n.report(of)
	if err != nil {
		return nil, err
	}
	dropped := n.dropped()
	var ledgers map[container.ID]booked
	if n.charger != nil {
		ledgers = n.charger.ledgers()
	}
	for i := range r.Accounts {
		a := &r.Accounts[i]
		a.Dropped = dropped[a.Container]
		if b, charged := ledgers[a.Container]; charged {
			a.Ledger = &api.NetCPULedger{
				Balance: b.Balance.Seconds(), Factor: b.factor,
				Charged: b.Charged.Seconds(), Credited: b.Credited.Seconds(), Forgiven: b.Forgiven.Seconds(),
			}
		}
	}
	for _, d := range n.Doors() {
		r.Uplinks = append(r.Uplinks, api.NetCPUUplink{Device: d.Device, NetNS: d.Netns, DropsBy: d.By, Why: d.Why})
	}
	return r, nil
}

// dropped returns how many packets for each container were dropped.
func (n *Netcpu) dropped() map[container.ID]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	of := make(map[container.ID]uint64)
	if n.guards != nil {
		of = n.guards.dropped()
	}
	for _, t := range n.tenants {
		if t.early == nil {
			continue
		}
		if c, err := n.early.read(t.early); err == nil {
			of[t.owner] = max(of[t.owner], c.Dropped)
		}
	}
	return of
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
