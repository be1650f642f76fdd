package bench

import (
	"time"

	"github.com/fairlead-project/fairlead/bench/rig"
)

// The metrics of the netcpu experiment.
const (
	// Penalty is how many times longer the victim takes for its work than
	// beside neighbours without packets (Iron, section 2).
	Penalty  = "penalty"
	Work     = "victim work"
	Sent     = "sent"
	Received = "received"
	Requests = "requests"
	P50      = "latency p50"
	P99      = "latency p99"
	// VictimCPU is the CPU time that the scheduler charged the victim with, per
	// second. What the victim does less than its CPU time says was taken from
	// it in softirq; what it has less than its quota, it never got.
	VictimCPU = "victim CPU"
	// CPUUsed is the part of the shared CPU that was not idle.
	CPUUsed = "CPU used"
	// Stolen is the part of VictimCPU that went into others' packets, by the
	// agent's accounts.
	Stolen = "victim stolen"
	// PacketCost is the CPU time of receiving a packet, by the agent's accounts,
	// with that of the tunnel that brought it (Iron, table 1).
	PacketCost = "packet cost"
	// Balance is what the accounts charged over the softirq and thread time that
	// there was: 1 is exact.
	Balance = "charged of measured"
	// OfStopwatch is the softirq time by the accounts over that by a stopwatch around
	// the same softirqs: 1 is exact.
	OfStopwatch = "accounts of stopwatch"
	// Price is what the accounts charge the first of two receivers for a packet over
	// what they charge the second for one of the same size: 1 is fair.
	Price = "price of first to second"
	// SystemPart is the part of all that was charged that no container pays for.
	SystemPart = "charged to the system"
	// Ramp is the penalty from the begin of the load to the begin of the
	// window, where that is toldRamp or longer: what the protection's way to what is due costs.
	Ramp = "ramp penalty"
	// OutsideCPU is the part of the time that the CPU of the clients outside was
	// busy. At 1 a victim that answers them is held back by them.
	OutsideCPU = "outside CPU"
	// ProgramCost is the CPU time that the agent's BPF programs take for a packet,
	// by the kernel's run-time statistics less what those add to each run;
	// ProgramRuns is how often they run for one, and StatisticsCost what the
	// statistics add to a run.
	ProgramCost    = "program cost"
	ProgramRuns    = "program runs"
	StatisticsCost = "statistics' own"
	// AccountsCost is what the victim loses for a packet by the accounts, as CPU time.
	AccountsCost = "accounts cost"
	// AgentCPU is the agent's own CPU time, per second.
	AgentCPU = "agent CPU"
	// AgentMemory is what the agent has of it, beside containers that do nothing.
	AgentMemory = "agent memory"
)

const toldRamp = time.Second

// sample is what was measured in one window.
type sample struct {
	work     float64 // units per second of the victim
	victim   float64 // CPU time charged to the victim, per second
	used     float64 // part of the shared CPU that was not idle
	agent    float64 // CPU time of the agent, per second
	memory   float64 // of the agent, resident, in bytes
	sent     float64 // per second
	received float64 // per second
	bits     float64 // per second, received
	p50, p99 float64 // of the requests, in seconds; 0 if there are none
	ramp     float64 // units per second of the victim before the window; 0 if that was short
	outside  float64 // part of the CPU outside that was not idle
	steal    float64 // part of the CPUs' time that the hypervisor took

	charges   *charges     // nil where the agent keeps no accounts
	exactness *exactness   // nil where nothing is timed
	programs  *programCost // nil where that is not what is measured
}

// add puts the figures of one measurement into the report.
func (e *experiment) add(su setup, d demand, on bool, base float64, m sample) {
	name := su.name + " " + d.name
	add := func(metric, unit string, value float64) { e.report.Add(name, metric, unit, on, value) }
	if !su.alone {
		add(Penalty, "1", base/m.work)
		if m.ramp > 0 {
			add(Ramp, "1", base/m.ramp)
		}
		add(Work, "1/s", m.work)
		if su.victim == memcached {
			add(OutsideCPU, "1", m.outside)
		}
		if su.victim != sysbench { // which starts anew for each window
			add(VictimCPU, "1", m.victim)
		}
	}
	if m.charges != nil && d.traffic.Kind != "" {
		if !su.alone {
			add(Stolen, "1", m.charges.stolen)
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
	if p := m.programs; p != nil {
		add(ProgramCost, "s", p.net)
		add(ProgramRuns, "1", p.runs)
		add(StatisticsCost, "s", p.statistics)
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
	case rig.UDPRR, rig.TCPRR, rig.Memcached:
		add(Requests, "1/s", m.sent)
		add(P50, "s", m.p50)
		add(P99, "s", m.p99)
	}
}
