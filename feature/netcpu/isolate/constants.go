package isolate

import "time"

// The constants of isolation. docs/measured.md and the decisions have what is measured; the rest is chosen,
// by the plant (TestPlant) where it models that.
const (
	patience  = 3               // s that ask for super-packets, or for a queue of its own, before those are given
	longest   = 60              // s: the limit of that after relapses, of a rest, and of delayed polls without an agent
	settled   = 5 * time.Second // of traffic that asks for a rest, when a queue is given that can be; after a flood
	lookEvery = time.Second     // between looks at neighbours in a flood, and at uplinks that work little
	askEvery  = 10              // windows in which NAPIs of live threads are listed once
	little    = 0.05            // of a CPU, or of the time: nobody goes short, and nobody notices, for less
	restIdle  = 0.15            // of a CPU: with more idle time threads have room again

	// Packets a second. Intruding single packets cost neighbours some 3 % of a core at smallMax without
	// isolation; the gap prevents oscillation.
	smallMax   = 20_000 // more must be isolated, although bulk comes in super-packets
	smallLow   = 5_000  // fewer, with enough super-packets, allow super; more end it without bulk
	superMin   = 2_000  // super-packets worth that: about 0.3 Gbit/s and up
	queueFlood = 50_000 // are a flood, which gets a queue at once or is held back: some tenth of a CPU
	leastRate  = 1_000  // make a queue worthwhile, and pass in any case

	ring        = 256              // packets: half of it comes between delayed polls, two may after a pause, to addresses not confirmed
	deferMost   = time.Millisecond // the longest time between delayed polls
	mostWeighed = 64               // tenants whose quotas are looked at in a window, 0.4 ms each

	paceGrow = 1.1 // of the rate per window, while there is time left
	paceBulk = 0.2 // of a CPU: more for one container's super-packets costs others as a flood does

	// What a dropped packet, and a veth for who does not pay, cost an uplink's thread, in packets that
	// pass: 0.50 to 0.71 of 2.6 to 4.1 µs on a busy machine, less by XDP; and 1,280 ns beside 980.
	paceDropped, paceVeth = 0.5, 1.3

	// paceReserved divides what is due to a container: the uplinks may work for its packets for that part
	// though its own tasks use up all.
	paceReserved = 4

	// Packets per turn of a thread: while one was polled, another came; and below this they come one by
	// one, as do so few in a window. Decision 10 has the measurement.
	crowded, oneByOne, few = 2.0, 1.5, 100
)
