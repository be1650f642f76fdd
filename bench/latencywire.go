package bench

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/rig"
)

// wireBias is by how much round trips are longer than at the NIC, in seconds: raw and
// corrected. wire are those at the NIC, in times since zero. They are joined by
// when they began, with more than near between two of them.
func wireBias(trips []api.LatencyTrip, wire []rig.Trip, zero time.Time) (raw, corrected []float64, err error) {
	const near = 500 * time.Microsecond
	next := 0
	for _, t := range trips {
		began := t.Time.Sub(zero)
		for next < len(wire) && wire[next].Asked < began-near {
			next++
		}
		if next == len(wire) {
			break
		}
		w := wire[next]
		if w.Asked > began+near {
			continue // the NIC has none of this one
		}
		took := (w.Answered - w.Asked).Seconds()
		raw, corrected = append(raw, t.Raw-took), append(corrected, t.Corrected-took)
	}
	if len(raw) < len(trips)/2 || len(raw) == 0 {
		return nil, nil, fmt.Errorf("of %d round trips %d were found at the NIC, which saw %d", len(trips), len(raw), len(wire))
	}
	return raw, corrected, nil
}

// monotonicZero is the wall clock's time when the monotonic one was at 0.
func monotonicZero() (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return time.Time{}, err
	}
	return time.Now().Add(-time.Duration(ts.Nano())), nil
}
