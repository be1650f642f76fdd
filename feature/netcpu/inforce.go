package netcpu

import (
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/charge"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// help describes the samples of Snapshot and Export. A sample without a container belongs to the
// host.
var help = map[string]string{
	"netcpu_isolated":                    "1 for a container whose packets run in threads of its own cgroup, or of its pod's.",
	"netcpu_early_dropped_packets_total": "Packets for the container that were dropped before its queue, because the queue was full or the quota was used up.",
	"netcpu_quota_dropped_packets_total": "Packets for the container that were dropped because its quota was used up.",
	"netcpu_super_packets":               "1 while what the isolated container receives stays in softirqs: bulk TCP in super-packets, or packets that take hardly any time from third parties.",
	"netcpu_kthread_seconds_total":       "CPU time of the container's NAPI threads; without a container label, of the uplinks' NAPI threads.",
	"netcpu_balance_seconds":             "CPU time that is owed to a charged container; negative if the container owes it.",
	"netcpu_charged_seconds_total":       "CPU time that was charged to the container.",
	"netcpu_credited_seconds_total":      "CPU time that was credited to the container.",
	"netcpu_forgiven_seconds_total":      "Debt of the container, in CPU time, that was cancelled because it was too large to be repaid.",
	"netcpu_limit_factor":                "Quota of the container (its weight, if it has no quota) as a fraction of what its owner has set.",
	"netcpu_limit_writes_total":          "Changes of the container's quota or weight.",

	"netcpu_tasks_seconds_total":     "CPU time of the container's cgroup.",
	"netcpu_throttled_seconds_total": "Time for which the container was throttled by its own quota.",
	"netcpu_seconds_total":           "CPU time of the container's packets; without a container label, of the system's packets.",
	"netcpu_packets_total":           "Packets of the container; without a container label, of the system.",
	"netcpu_stolen_seconds_total":    "CPU time of the container that was spent on the packets of others.",
	"netcpu_taken_seconds_total":     "CPU time of others that was spent on the container's packets.",
	"netcpu_theft_seconds_total":     "CPU time of the victim that was spent on the culprit's packets; \"other\" is the sum of the smallest pairs.",
	"netcpu_measured_seconds_total":  "CPU time of all packet work.",
	"netcpu_system_seconds_total":    "CPU time of packets that belong to no container.",
	"netcpu_lost_events_total":       "Charges without a record of the victim, because the table was full.",
}

// Snapshot implements feature.Feature.
func (n *Netcpu) Snapshot() feature.Snapshot {
	n.mu.Lock()
	defer n.mu.Unlock()
	return feature.Snapshot{Taken: time.Now(), Help: help, Samples: n.inForce().samples(n.isolator.Samples(nil))}
}

// inForce holds the measures in force beside accounting.
type inForce struct {
	Drops   map[container.ID]drop.Counters // of isolated and charged tenants, by the container that pays
	Ledgers map[container.ID]charge.Booked // of the charged containers
	Points  []drop.Point                   // where packets are dropped now
}

// wire adds the drops and the ledger of a container to its account.
func (f inForce) wire(a *api.NetCPUAccount) {
	id := container.ID(a.Container)
	a.Dropped, a.QuotaDropped = f.Drops[id].Dropped, f.Drops[id].Beyond
	if b, charged := f.Ledgers[id]; charged {
		a.Ledger = &api.NetCPULedger{
			Balance: b.Balance.Seconds(), Factor: b.Factor,
			Charged: b.Charged.Seconds(), Credited: b.Credited.Seconds(), Forgiven: b.Forgiven.Seconds(),
		}
	}
}

// samples appends the samples of drops and ledgers.
func (f inForce) samples(to []feature.Sample) []feature.Sample {
	add := func(id container.ID, name string, v float64) {
		to = append(to, feature.Sample{Container: id, Name: name, Value: v})
	}
	for id, c := range f.Drops {
		if !c.Charged {
			add(id, "netcpu_early_dropped_packets_total", float64(c.Dropped))
		}
		add(id, "netcpu_quota_dropped_packets_total", float64(c.Beyond))
	}
	for id, b := range f.Ledgers {
		add(id, "netcpu_balance_seconds", b.Balance.Seconds())
		add(id, "netcpu_charged_seconds_total", b.Charged.Seconds())
		add(id, "netcpu_credited_seconds_total", b.Credited.Seconds())
		add(id, "netcpu_forgiven_seconds_total", b.Forgiven.Seconds())
		add(id, "netcpu_limit_writes_total", float64(b.Writes))
		add(id, "netcpu_limit_factor", b.Factor)
	}
	return to
}

// inForce returns the measures in force beside accounting. It does not wait for an Apply.
func (n *Netcpu) inForce() inForce {
	f := inForce{Drops: n.dropper.Counters(), Points: n.dropper.Points()}
	if n.charger != nil {
		f.Ledgers = n.charger.Ledgers()
	}
	return f
}

// Maps implements feature.Mapped.
func (n *Netcpu) Maps() (list []bpf.Usage) {
	if n.dropper != nil {
		list = n.dropper.Maps()
	}
	if n.meter != nil {
		list = append(list, n.meter.Maps()...)
	}
	return list
}
