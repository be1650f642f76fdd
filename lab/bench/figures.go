package bench

import (
	"github.com/fairlead-project/fairlead/lab/rig"
)

// The metrics of the netcpu experiment.
const (
	// Penalty is how many times longer the victim's work takes than beside neighbours
	// without packets (Iron, section 2).
	Penalty  = "penalty"
	Work     = "victim work"
	Sent     = "sent"
	Received = "received"
	Requests = "requests"
	P50      = "latency p50"
	P99      = "latency p99"
	Longest  = "latency longest"
	// Retransmitted is how many TCP segments the server and its client retransmitted.
	Retransmitted = "retransmitted"
	// VictimCPU is the CPU time that the scheduler charged to the victim, per second. If
	// the victim did less work than that time allows, softirqs took the rest. If the
	// time is less than its quota, the victim did not get its quota.
	VictimCPU = "victim CPU"
	// CPUUsed is the fraction of the time in which the shared CPU was not idle.
	CPUUsed = "CPU used"
	// PacketCost is the CPU time of receiving a packet, including decapsulation,
	// according to the agent's accounts (Iron, table 1).
	PacketCost = "packet cost"
	// Balance is the charged time divided by the softirq and thread time: 1 is exact.
	Balance = "charged of measured"
	// OfStopwatch is the accounts' softirq time divided by that of a stopwatch around the
	// same softirqs: 1 is exact.
	OfStopwatch = "accounts of stopwatch"
	// Price is the charge of the first of two receivers for a packet, divided by the
	// second's for a packet of the same size: 1 is fair.
	Price = "price of first to second"
	// SystemPart is the fraction of the charged time that went to the system.
	SystemPart = "charged to the system"
	// AccountsCost is the CPU time that the accounts cost the victim per packet.
	AccountsCost = "accounts cost"
	// AgentCPU is the agent's own CPU time, per second.
	AgentCPU = "agent CPU"
	// AgentMemory is the agent's resident memory, beside containers that do nothing.
	AgentMemory = "agent memory"
)

// sample is the result of one window.
type sample struct {
	work          float64 // units per second of the victim
	counted       float64 // the same between the agent's two accounts; NaN: not known
	victim        float64 // CPU time charged to the victim, per second
	used          float64 // fraction of the time in which the shared CPU was not idle
	agent         float64 // CPU time of the agent, per second
	memory        float64 // of the agent, resident, in bytes
	sent          float64 // per second
	received      float64 // per second
	bits          float64 // per second, received
	p50, p99      float64 // of the requests, in seconds; 0 if there are none
	longest       float64 // likewise
	retransmitted float64 // segments of TCP in the window
	steal         float64 // fraction of the CPU time that the hypervisor took

	charges   *charges   // nil where the agent keeps no accounts
	exactness *exactness // nil without a stopwatch
}

// addSample adds the figures of one measurement to the report.
func (e *experiment) addSample(su setup, d demand, a arm, alone undisturbed, m sample) {
	base := alone.work
	name := su.name + " " + d.name
	add := func(metric, unit string, value float64) { e.add(name, a, figure{metric, unit, value}) }
	if su.service != "" {
		add(Requests, "1/s", m.work)
		add(P50, "s", m.p50)
		add(P99, "s", m.p99)
		add(Longest, "s", m.longest)
		add(Retransmitted, "1", m.retransmitted)
		add(VictimCPU, "1", m.victim)
		add(CPUUsed, "1", m.used)
		if d.traffic.Kind != "" {
			add(Received, "1/s", m.received)
		}
		return
	}
	if !su.alone {
		add(Penalty, "1", base/m.work)
		add(Work, "1/s", m.work)
		add(VictimCPU, "1", m.victim)
	}
	if m.charges != nil && d.traffic.Kind != "" {
		if !su.alone {
			e.add(name, a, alone.slowedFigures(m.counted, m.charges.slowed)...)
		}
		if cost, ok := m.charges.cost[protocol(string(d.traffic.Kind))]; ok && !d.traffic.Out {
			add(PacketCost, "s", cost)
		}
		if m.charges.balance > 0 {
			add(Balance, "1", m.charges.balance)
		}
	}
	if x := m.exactness; x != nil {
		add(OfStopwatch, "1", x.whole)
		add(SystemPart, "1", x.system)
		if x.price > 0 {
			add(Price, "1", x.price)
		}
	}
	if su.alone && d.traffic.Kind == "" {
		add(AgentCPU, "1", m.agent)
		add(AgentMemory, "B", m.memory)
		return
	}
	if su.alone || d.long > 0 {
		add(CPUUsed, "1", m.used)
	}
	switch d.traffic.Kind {
	case rig.UDP, rig.Overrun:
		add(Sent, "1/s", m.sent)
		add(Received, "1/s", m.received)
	case rig.TCP:
		add(Received, "bit/s", m.bits)
	case rig.UDPRR, rig.TCPRR:
		add(Requests, "1/s", m.sent)
		add(P50, "s", m.p50)
		add(P99, "s", m.p99)
	}
}
