package bench

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/lab/rig"
)

// The part of a request's latency that a qdisc can influence: its wait in the queue of the NIC.
const (
	QueueP99  = "wait at the queue p99"
	QueueP999 = "wait at the queue p99.9"
	QueueMax  = "wait at the queue max"
)

// requestSize is the payload of a request, in bytes.
const requestSize = 64

// requestFrame is the length of a request's frame at the NIC.
func requestFrame(p rig.Path) int {
	const ethernet, ipv4, udp, vxlan = 14, 20, 8, 8
	n := ethernet + ipv4 + udp + requestSize
	if p == rig.VXLAN {
		n += ethernet + ipv4 + udp + vxlan
	}
	return n
}

// waited returns the figures between two readings of a queue. length is the time between them: without
// a request that has left the queue, all have waited for as long.
func waited(now, earlier rig.Waits, length time.Duration) ([]figure, error) {
	q := now.Since(earlier.Histogram)
	if missed := now.Missed - earlier.Missed; missed > q.Count()/1000 {
		return nil, fmt.Errorf("the queue's delay of %d requests was not measured, of %d it was", missed, q.Count())
	}
	at := func(part float64) float64 {
		if q.Count() == 0 {
			return length.Seconds()
		}
		return q.Quantile(part).Seconds()
	}
	return []figure{{QueueP99, "s", at(0.99)}, {QueueP999, "s", at(0.999)}, {QueueMax, "s", at(1)}}, nil
}
