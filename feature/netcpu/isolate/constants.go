package isolate

import "time"

// Limits of the actuators, which are no part of the law.
const (
	ring      = 256              // packets in a veth's ring: a delayed poll brings half of it; twice as many may go to unconfirmed addresses
	deferMost = time.Millisecond // longest time between delayed polls (decision 13)
)
