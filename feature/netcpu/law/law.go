// Package law has the constants by which netcpu decides who pays for packets, when and how much. Those
// that another value follows from are derived from these where they are used. It has neither the kernel's
// limits and units, nor the sizes of buffers and tables, nor bounds on what the agent itself spends.
//
// The plant is TestPlant of package isolate; the other measurements are in docs/measured.md and
// docs/decisions.
package law

import "time"

// Times.
const (
	// Tick is the time between rounds of the ledgers and looks at the uplinks: two usual periods of a
	// quota, so that each round contains the same number of them.
	Tick = 200 * time.Millisecond
	// Window is the time over which traffic is judged: one burst is not traffic.
	Window = 5 * Tick
	// Patience is for how long traffic asks for a setting that costs others more, before it gets that:
	// super-packets, a queue, a credit.
	Patience = 3 * Window
	// Calm is for how long the packets of somebody who pays have to cost little before he goes free.
	Calm = 10 * Window
	// Growth is how many times as long either may last for somebody who comes back: four doublings.
	Growth = 16
	// Long is the time after which what was learned is forgotten, and what no agent renews lapses.
	Long = 60 * Window
)

// Parts of a CPU, of a quota, or of a weight.
const (
	// Steal is what the packets of a container may take from tasks that want to run, unless policy sets
	// another share: neighbours notice more. With twice as much victims lose 5 % on half as many hosts
	// again of the plant.
	Steal = 0.03
	// Loss is what all containers together may take from one before it is credited, and what a container
	// takes that pays because many take.
	Loss = 0.005
	// Least is the part that counts as nothing: of waiting, of work, of what a quota has left. The kernel
	// accounts in ticks, so that no balance reaches zero.
	Least = 0.05
	// Write is the change of a quota or weight that is worth a write, which gives away up to a quota.
	Write = 0.02
	// Half is how far below a limit its opposite begins, so that nothing oscillates; and the part of what is
	// owed, or of a new reading, that counts at once.
	Half = 0.5
	// Most is how many times its quota or weight a container may get, or keep a part of, in others' favour.
	Most = 4
)

// Packets.
const (
	// Rate is the least that is worth a queue, and that may always pass the uplinks: 0.1 % of a CPU, in
	// packets/s.
	Rate = 1_000
	// Flood is a rate, in packets/s, that takes a tenth of a CPU: it gets a queue at once, or is held back.
	Flood = 50_000
	// Single is the rate of single packets, in packets/s, that cost neighbours Steal without isolation.
	Single = 20_000
	// Crowd is how many packets a thread polls in a turn while it leaves its container's tasks too little
	// (decision 10).
	Crowd = 2.0
	// Dropped is the cost of a dropped packet in packets that pass, for an uplink's thread: 0.50 to 0.71 of
	// 2.6 to 4.1 µs on a busy machine, less by XDP.
	Dropped = 0.5
)
