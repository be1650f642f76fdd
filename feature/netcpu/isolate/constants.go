package isolate

import "time"

// The constants of isolation. Decisions 2, 10, 13 and 15 and docs/measured.md have the measurements; what
// has none was chosen, on the model of hosts (TestPlant) where it covers that.
const (
	patience  = 3               // s of traffic that asks for super-packets, or for a queue of its own, before it gets them
	longest   = 60              // s: patience after relapses, a rest of the uplinks, and delayed polls without an agent end there
	settled   = 5 * time.Second // a rest begins after as much traffic that asks for it; delayed polls end as long after a flood
	lookEvery = time.Second     // how often a flood has us read the neighbours, and quiet uplinks are read
	askEvery  = 10              // windows: while all threads of a container live, one in so many lists its NAPIs
	little    = 0.05            // of a CPU, or of a window: a container that waits or works less counts as one that does not
	restIdle  = 0.15            // of a CPU: a rest ends once the uplinks' CPUs idle for more

	// Packets a second. Without isolation smallMax intruding single packets cost the neighbours some 3 % of
	// a CPU; the gap to smallLow prevents oscillation.
	smallMax   = 20_000 // more of them are isolated, even beside bulk TCP
	smallLow   = 5_000  // fewer, beside bulk TCP, leave TSO on; more, without bulk TCP, turn it off
	superMin   = 2_000  // super-packets: bulk TCP, about 0.3 Gbit/s and up
	queueFlood = 50_000 // a flood, some tenth of a CPU: it gets a queue at once, or is held back
	leastRate  = 1_000  // the least that is worth a queue, and that may always pass

	ring        = 256              // packets: delayed polls bring half of it; after a pause twice as many may go to addresses not confirmed
	deferMost   = time.Millisecond // the longest time between delayed polls
	mostWeighed = 64               // tenants whose quotas one window reads, at 0.4 ms each

	paceGrow = 1.1 // the growth of a rate by window, while CPU time is left
	paceBulk = 0.2 // of a CPU: super-packets of one container that cost more are held back as a flood is

	// The cost of a dropped packet, and of the veth of a container that does not pay, for an uplink's
	// thread, in packets that pass: 0.50 to 0.71 of 2.6 to 4.1 µs on a busy machine, less by XDP; and
	// 1,280 ns beside 980.
	paceDropped, paceVeth = 0.5, 1.3

	// A container keeps 1/paceReserved of what is due to it for the uplinks' work on its packets, even
	// while its own tasks use up all of it.
	paceReserved = 4

	// Packets by turn of a thread: with crowded others come while it polls one; below oneByOne, or with
	// fewer than few in a window, they come one by one (decision 10).
	crowded, oneByOne, few = 2.0, 1.5, 100
)
