package agent

import (
	"math/rand/v2"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
)

// pace holds the intervals of a worker and of the agent. Tests use their own.
type pace struct {
	call    time.Duration // bound of one call of a feature
	first   time.Duration // wait after the first failure; doubled after each further one
	longest time.Duration // bound of that wait
	refresh time.Duration // how often what is in force is applied again
	decide  time.Duration // how often to ask features for decisions
	view    time.Duration // how often to compute the overview
	stop    time.Duration // for the features to remove what is in force, and for the journal
	now     func() time.Time
	jitter  func() float64 // in [0, 1)
}

// ordinary is the pace of a real agent. A container that is just starting often lacks its
// interfaces for some milliseconds, so the first wait is short.
func ordinary() pace {
	return pace{
		call:    10 * time.Second,
		first:   50 * time.Millisecond,
		longest: time.Minute,
		refresh: 5 * time.Minute,
		decide:  time.Second,
		view:    overviewEvery,
		stop:    15 * time.Second,
		now:     time.Now,
		jitter:  rand.Float64,
	}
}

// spread changes d by up to a fifth at random, so that calls that failed together are not repeated
// together.
func (p pace) spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*p.jitter()))
}

func (p pace) backoff(tries int) time.Duration {
	return p.spread(backoff.Nth(tries, p.first, p.longest))
}

// rest is the pause after the nth panic in a row of one container, or of one method that reads. The
// first is long enough that no single one makes the feature unavailable.
func (p pace) rest(n int) time.Duration {
	return p.spread(backoff.Nth(n, panicTime/2, p.refresh))
}
