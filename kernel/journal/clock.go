package journal

import (
	"time"

	"golang.org/x/sys/unix"
)

// clock is one moment on both clocks. An Expiry is a span of time, so the file stores it on the
// monotonic clock, which cannot be set and which stops while the host is suspended. All processes
// of a boot share that clock.
type clock struct {
	now       time.Time
	monotonic time.Duration
}

func readClock() (clock, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return clock{}, err
	}
	return clock{time.Now(), time.Duration(ts.Nano())}, nil
}

// lapses converts an expiry to the monotonic clock, in ns. It returns 0 for no expiry, and for an
// injected clock, which has no monotonic reading.
func (c clock) lapses(expiry time.Time) int64 {
	if expiry == expiry.Round(0) {
		return 0
	}
	return int64(c.monotonic + expiry.Sub(c.now))
}

// expiry is the reverse of lapses.
func (c clock) expiry(lapses int64) time.Time {
	return c.now.Add(time.Duration(lapses) - c.monotonic)
}
