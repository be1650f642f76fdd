package bench

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// wireBias is by how much round trips are longer than at the NIC, in seconds: raw and
// corrected. wire are those at the NIC, in times since about zero. Each trip is held
// against the one that began next to it, if that is near.
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

// nearest finds the trip at the NIC that began next to a time, from one on that began
// before, and how far away it is.
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

// aligned corrects zero, which two processes read apart: requests may follow one another
// more closely than that is exact. With the right one trips begin where those at the
// NIC do. Some of the trips are tried as one of those near them, as any may have been
// held up between its two stamps.
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

// monotonicZero is the wall clock's time when the monotonic one was at 0: the best of
// some readings, as whoever reads may lose its CPU between the two.
func monotonicZero() (zero time.Time, err error) {
	best := time.Hour
	for range 20 {
		var ts unix.Timespec
		began := time.Now()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return zero, err
		}
		if took := time.Since(began); took < best {
			best, zero = took, began.Add(took/2-time.Duration(ts.Nano()))
		}
	}
	return zero, nil
}
