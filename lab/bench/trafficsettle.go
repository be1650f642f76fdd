package bench

import (
	"context"
	"time"
)

// The length of a step in which the shares are measured, how many good steps in a row are
// required, and the largest sum of deviations of a good step.
const (
	settleStep  = 50 * time.Millisecond
	settleSteps = 3
	settleOff   = 0.15
)

// settles waits until the shares of a phase are right. It returns the time to the end of
// the first good step, or its patience if there is none.
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
		// A step is bad if the shares deviate too much, or the link is not full.
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
