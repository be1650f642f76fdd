package isolate

import "time"

// What the actuators take, which is no part of the law.
const (
	ring      = 256              // packets in a veth: delayed polls bring half of it; after a pause twice as many may go to addresses not confirmed
	deferMost = time.Millisecond // the longest time between delayed polls (decision 13)
)
