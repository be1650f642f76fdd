package bench

import (
	"context"
	"time"
)

// The steps in which it is looked whether shares are those that are due, how
// many good ones in a row are asked for, and how far off, all together, a good one may be.
const (
	settleStep  = 50 * time.Millisecond
	settleSteps = 3
	settleOff   = 0.15
)

// settles waits until the shares of a phase are those that are due, and gives
// how long it took to the end of the first step that was good; the end of its
// patience, if they never are.
func (s *trafficSession) settles(ctx context.Context, p phase) (time.Duration, error) {
	const patience = 2 * time.Second
	start, good, since := time.Now(), 0, time.Duration(0)
	before := s.read()
	for time.Since(start) < patience {
		began := time.Since(start)
		if err := sleep(ctx, settleStep); err != nil {
			return 0, err
		}
		now := s.read()
		var total, off float64
		bits := make(map[string]float64)
		for name := range s.load {
			bits[name] = now[name].Since(before[name]).BitRate()
			total += bits[name]
		}
		before = now
		for name := range s.load {
			off += max(bits[name]/max(total, 1)-p.due[name], p.due[name]-bits[name]/max(total, 1))
		}
		// As much as the link takes, and everybody's part of it.
		if off > settleOff || total < 0.85*float64(s.setup.link) {
			good = 0
			continue
		}
		if good == 0 {
			since = began + settleStep
		}
		if good++; good == settleSteps {
			return since, nil
		}
	}
	return patience, nil
}
