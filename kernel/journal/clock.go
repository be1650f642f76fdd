package journal

import (
	"time"

	"golang.org/x/sys/unix"
)

// clock is one moment by both clocks. An Expiry is an amount of time, so it goes by the
// monotonic one, which nobody sets and which stands still while the host is suspended. It
// is the same for all processes of a boot, and so is what the file holds.
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

// lapses gives an expiry by the monotonic clock, in ns; 0 for one that is known by the wall
// clock alone, as those that earlier releases noted.
func (c clock) lapses(expiry time.Time) int64 {
	if expiry == expiry.Round(0) {
		return 0
	}
	return int64(c.monotonic + expiry.Sub(c.now))
}

// expiry is the reverse.
func (c clock) expiry(lapses int64) time.Time {
	return c.now.Add(time.Duration(lapses) - c.monotonic)
}
