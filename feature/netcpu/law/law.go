// Package law has the constants by which netcpu decides who pays for packets, when and how much. Code
// derives further constants from them where it uses those. The package has neither the kernel's limits
// and units, nor sizes of buffers and tables, nor bounds on the cost of the agent.
//
// "The plant" below is TestPlant of package isolate. docs/measured.md and docs/decisions have the other
// measurements.
package law

import "time"

// Times.
const (
	// Tick is the time between rounds of the ledgers and looks at the uplinks. It is two default periods
	// of a quota, so that each round contains the same number of periods.
	Tick = 200 * time.Millisecond
	// Window is the time over which traffic is judged, so that one burst does not decide.
	Window = 5 * Tick
	// Patience is the time for which traffic has to ask for a setting that costs others more, before it
	// gets the setting: super-packets, a queue, a credit.
	Patience = 3 * Window
	// Calm is the time for which a container's packets have to cost little before it no longer pays.
	Calm = 10 * Window
	// Growth is the factor by which Patience or Calm may grow for a container that comes back: 4 doublings.
	Growth = 16
	// Long is the time after which traffic is forgotten, and changes lapse that no agent renews.
	Long = 60 * Window
)

// Parts of a CPU, of a quota, or of a weight.
const (
	// Steal is the share of a CPU that a container's packets may take from tasks that want to run, unless
	// policy sets another share. Neighbours notice more: with twice as much, victims lose 5 % on one and
	// a half times as many hosts of the plant.
	Steal = 0.03
	// Loss is the share that all containers together may take from one before it gets credit. It is also
	// the least that a container takes which pays because many containers take.
	Loss = 0.005
	// Least is the part that counts as nothing: of waits, of work, of the rest of a quota. The kernel
	// accounts in ticks, so no balance reaches zero.
	Least = 0.05
	// Write is the change of a quota or weight that is worth a write, which gives away up to a quota.
	Write = 0.02
	// Half is the part of a limit at which the opposite decision begins, so that decisions do not
	// oscillate. It is also the part of a debt, or of a new reading, that counts at once.
	Half = 0.5
	// Most is the highest factor on a container's quota or weight. It keeps 1/Most in others' favour.
	Most = 4
)

// Packets.
const (
	// Rate is the lowest rate, in packets/s, that is worth a queue, and the rate that may always pass the
	// uplinks. It takes 0.1 % of a CPU.
	Rate = 1_000
	// Flood is a rate, in packets/s, that takes a tenth of a CPU. It gets a queue at once, or is held back.
	Flood = 50_000
	// Single is the rate of single packets, in packets/s, that takes Steal from neighbours without isolation.
	Single = 20_000
	// Crowd is the number of packets that a thread polls in a turn if it leaves too little time to its
	// container's tasks (decision 10).
	Crowd = 2.0
	// Dropped is the cost of a dropped packet for an uplink's thread, in packets that pass: 0.50 to 0.71 of
	// 2.6 to 4.1 µs on a busy machine, less by XDP.
	Dropped = 0.5
)
