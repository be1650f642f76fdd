package bench

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// bias makes round trips, and returns the difference between each and the same trip at the
// NIC, raw, and the absolute difference when corrected.
func (s *latencySession) bias(ctx context.Context) (raw, corrected []float64, err error) {
	name, filter := s.rig.Prefix()+"one", api.LatencyFilter{Port: latencyPort}
	asked, err := s.guard.client.LatencyRecords(ctx, name, filter, 0)
	if err != nil {
		return nil, nil, s.guard.explain(err)
	}
	truth, err := s.rig.Tap(latencyPort)
	if err != nil {
		return nil, nil, err
	}
	defer truth.Close()
	s.client.SetRate(latencyEach)
	if err := sleep(ctx, s.settle+s.take); err != nil {
		return nil, nil, err
	}
	s.client.SetRate(0)
	filter.After = asked.Next
	got, err := s.guard.client.LatencyRecords(ctx, name, filter, time.Second)
	if err != nil {
		return nil, nil, s.guard.explain(err)
	}
	wire, err := truth.Trips()
	if err != nil {
		return nil, nil, err
	}
	trips, _ := api.LatencyTrips(got.Records)
	raw, corrected, err = wireBias(trips, wire, monotonicZero())
	for i := range corrected {
		corrected[i] = math.Abs(corrected[i])
	}
	return raw, corrected, err
}

// wireBias returns the differences between round trips and the same trips at the NIC, in
// seconds, raw and corrected. wire are the trips at the NIC, in times since about zero.
// wireBias compares each trip with the one at the NIC that began closest to it, if that is
// near enough.
func wireBias(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) (raw, corrected []float64, err error) {
	const near = 500 * time.Microsecond
	zero = aligned(trips, wire, zero)
	next := 0
	for _, t := range trips {
		var off time.Duration
		if next, off = nearest(wire, next, t.Time.Sub(zero)); off > near {
			continue // the NIC has none of this one
		}
		took := (wire[next].Answered - wire[next].Asked).Seconds()
		raw, corrected = append(raw, t.Raw-took), append(corrected, t.Corrected-took)
	}
	if len(raw) < len(trips)/2 || len(raw) == 0 {
		return nil, nil, fmt.Errorf("of %d round trips %d were found at the NIC, which saw %d", len(trips), len(raw), len(wire))
	}
	return raw, corrected, nil
}

// nearest returns the trip at the NIC that began closest to a time, and the distance
// between the two. It searches from a trip that began earlier.
func nearest(wire []rig.Trip, from int, began time.Duration) (int, time.Duration) {
	if len(wire) == 0 {
		return from, time.Hour
	}
	off := func(i int) time.Duration { return (wire[i].Asked - began).Abs() }
	for from+1 < len(wire) && off(from+1) <= off(from) {
		from++
	}
	return from, off(from)
}

// aligned corrects zero. Two processes read their clocks separately, and requests may be closer to
// one another than the error of these readings. With the right zero, trips begin at the same times
// as the trips at the NIC. aligned tries several trips, because any one may have been delayed
// between its two stamps.
func aligned(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) time.Time {
	const anchors, apart, far = 8, 5 * time.Millisecond, 20 * time.Microsecond
	best, least := zero, time.Duration(math.MaxInt64)
	for k := range min(anchors, len(trips)) {
		anchor := trips[k*len(trips)/anchors].Time
		for _, w := range wire {
			if (w.Asked - anchor.Sub(zero)).Abs() > apart {
				continue
			}
			try, next := anchor.Add(-w.Asked), 0
			var sum, off time.Duration
			for _, t := range trips {
				next, off = nearest(wire, next, t.Time.Sub(try))
				sum += min(off, far)
			}
			if sum < least {
				best, least = try, sum
			}
		}
	}
	return best
}

// monotonicZero is the time of the wall clock at which the monotonic clock was 0. It is the
// best of several readings, because a reader may lose its CPU between the two clocks.
func monotonicZero() (zero time.Time) {
	best := time.Hour
	for range 20 {
		began := time.Now()
		now := time.Duration(bpf.Clock())
		if took := time.Since(began); took < best {
			best, zero = took, began.Add(took/2-now)
		}
	}
	return zero
}
