package bench

import (
	"context"
	"time"
)

// The traffic of one second at the NIC, as a fraction of the ceil: in the first second,
// and the maximum.
const (
	FirstSecond = "first second, of the ceil"
	WorstSecond = "worst second, of the ceil"
)

// bounded measures the traffic at the NIC from the first packet on, for a window and one
// second more, in seconds that start every 20 ms.
func (s *trafficSession) bounded(ctx context.Context, c trafficCase) ([]figure, error) {
	const step, second = 20 * time.Millisecond, time.Second
	type sample struct {
		at    time.Duration
		bytes uint64
	}
	var all []sample
	var first, worst float64
	for start, from := time.Now(), 0; ; {
		bytes, err := s.rig.Sent()
		if err != nil {
			return nil, err
		}
		now := sample{time.Since(start), bytes}
		all = append(all, now)
		for now.at-all[from].at >= second {
			rate := 8 * float64(now.bytes-all[from].bytes) / (now.at - all[from].at).Seconds() / float64(c.ceil)
			if from == 0 {
				first = rate
			}
			worst = max(worst, rate)
			from++
		}
		if now.at >= s.take+second {
			break
		}
		if err := sleep(ctx, step); err != nil {
			return nil, err
		}
	}
	return []figure{{FirstSecond, "1", first}, {WorstSecond, "1", worst}}, nil
}
