package charge

import "time"

// The steps of the search for the begin of a period: first anywhere, then where
// it has to come again.
const (
	coarse = 2 * time.Millisecond
	fine   = 250 * time.Microsecond
	enough = 4 * fine // known as well as that, the search ends
	long   = 10       // periods after which it ends with what is known
)

// pace finds out when the bandwidth periods of a cgroup begin, from how many
// there have been at one moment and another. Their phase stays the same for as
// long as the cgroup lives: a write of the quota does not move it, nor a pause
// (kernel/sched/fair.c forwards the timer by whole periods).
type pace struct {
	period time.Duration
	lo, hi time.Time // a period has begun between them; zero: not known
	last   time.Time // the begin of the last look
	count  uint64    // periods then
	began  time.Time // the search
}

// saw notes a look at the count of periods, between two moments.
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

// known says whether the begin is known well enough to act on it.
func (p *pace) known(now time.Time) bool {
	return !p.hi.IsZero() && (p.hi.Sub(p.lo) <= enough || now.Sub(p.began) > long*p.period)
}

// idle says that the search has come to nothing, as periods are not counted
// while nobody runs in the cgroup: whenever one writes then is as good.
func (p *pace) idle(now time.Time) bool {
	return p.hi.IsZero() && !p.began.IsZero() && now.Sub(p.began) > 3*p.period
}

// search returns when to look next, until the begin is known.
func (p *pace) search(now time.Time) time.Time {
	if p.hi.IsZero() {
		return now.Add(coarse)
	}
	// Once around, to the last moment before the begin.
	since := now.Sub(p.lo) % p.period
	if since <= p.hi.Sub(p.lo)+fine {
		return now.Add(fine)
	}
	return now.Add(p.period - since)
}

// next returns the first moment after now at which a period has surely begun.
func (p *pace) next(now time.Time) time.Time {
	return now.Add(p.period - now.Sub(p.hi)%p.period)
}

// late returns for how long the period of now has been going on, for sure: what
// is not known of it must not keep anybody from writing for ever.
func (p *pace) late(now time.Time) time.Duration { return now.Sub(p.hi) % p.period }
