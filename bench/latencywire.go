package bench

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// wireBias is by how much round trips are longer than at the NIC, in seconds: raw and
// corrected. wire are those at the NIC, in times since zero. Each trip is held against
// the one that began next to it, if that is near.
func wireBias(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) (raw, corrected []float64, err error) {
	const near = 500 * time.Microsecond
	next := 0
	for _, t := range trips {
		began := t.Time.Sub(zero)
		off := func(i int) time.Duration { return (wire[i].Asked - began).Abs() }
		for next+1 < len(wire) && off(next+1) <= off(next) {
			next++
		}
		if next == len(wire) || off(next) > near {
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
