package charge

import "time"

// The steps of the search for the start of a period: coarse at first, then fine around the expected
// time.
const (
	coarse = 2 * time.Millisecond
	fine   = 250 * time.Microsecond
	enough = 4 * fine // the search ends with this precision
	long   = 10       // periods after which it ends with the present precision
)

// pace finds the start of the bandwidth periods of a cgroup, by reading their count at several
// moments. Their phase stays the same for the life of the cgroup: neither a write of the quota nor
// a pause moves it (kernel/sched/fair.c forwards the timer by whole periods).
type pace struct {
	period time.Duration
	lo, hi time.Time // a period started between them; zero: not known
	last   time.Time // the start of the last look
	count  uint64    // periods at that time
	began  time.Time // the start of the search
}

// saw records a reading of the count of periods, made between two moments.
func (p *pace) saw(from, to time.Time, count uint64) {
	if p.began.IsZero() {
		p.began = from
	}
	if !p.last.IsZero() && count == p.count+1 {
		if width := to.Sub(p.last); p.hi.IsZero() && width <= 4*coarse || width < p.hi.Sub(p.lo) {
			p.lo, p.hi = p.last, to
		}
	}
	p.last, p.count = from, count
}

// known reports whether the start is known precisely enough to act on it.
func (p *pace) known(now time.Time) bool {
	return !p.hi.IsZero() && (p.hi.Sub(p.lo) <= enough || now.Sub(p.began) > long*p.period)
}

// idle reports that the search found nothing because no task runs in the cgroup, so that no periods
// are counted: any time is then as good for a write.
func (p *pace) idle(now time.Time) bool {
	return p.hi.IsZero() && !p.began.IsZero() && now.Sub(p.began) > 3*p.period
}

// search returns when to look next, until the start is known.
func (p *pace) search(now time.Time) time.Time {
	if p.hi.IsZero() {
		return now.Add(coarse)
	}
	// Wait through the period, until just before the next start.
	since := now.Sub(p.lo) % p.period
	if since <= p.hi.Sub(p.lo)+fine {
		return now.Add(fine)
	}
	return now.Add(p.period - since)
}

// next returns the first moment after now at which a period has surely started.
func (p *pace) next(now time.Time) time.Time {
	return now.Add(p.period - now.Sub(p.hi)%p.period)
}

// late returns the time for which the present period has surely lasted: an imprecise start must not
// prevent writes for ever.
func (p *pace) late(now time.Time) time.Duration { return now.Sub(p.hi) % p.period }
