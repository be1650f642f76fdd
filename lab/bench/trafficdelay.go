package bench

import (
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/hist"
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

// queueReading holds the counters of a rig.Queue at one moment.
type queueReading struct {
	waits  *hist.Histogram
	missed uint64
}

func readQueue(q *rig.Queue) (queueReading, error) {
	h, missed, err := q.Read()
	return queueReading{h, missed}, err
}

// figures returns the figures between two readings. length is the time between them: without a
// request that has left the queue, all have waited for as long.
func (r queueReading) figures(earlier queueReading, length time.Duration) ([]figure, error) {
	q := r.waits.Since(earlier.waits)
	if missed := r.missed - earlier.missed; missed > q.Count()/1000 {
		return nil, fmt.Errorf("the queue's delay of %d requests was not measured, of %d it was", missed, q.Count())
	}
	waited := func(at float64) float64 {
		if q.Count() == 0 {
			return length.Seconds()
		}
		return q.Quantile(at).Seconds()
	}
	return []figure{{QueueP99, "s", waited(0.99)}, {QueueP999, "s", waited(0.999)}, {QueueMax, "s", waited(1)}}, nil
}
