package charge

import "time"

// pace finds when the bandwidth periods of a cgroup start, from several readings of their count. The
// phase of the periods is the same for the life of the cgroup: neither a write of the quota nor a
// pause moves it (kernel/sched/fair.c forwards the timer by whole periods).
type pace struct {
	period time.Duration
	start  time.Time // just after the start of a period; zero: unknown
	began  time.Time // start of the search
	last   time.Time // last look
	count  uint64    // periods at the last look
}

// saw records a look at the count of periods, and reports whether to write now: a period has just
// begun, or the search has seen none begin. In the second case no task runs, so the kernel counts no
// periods, or looks come late on a busy CPU.
func (p *pace) saw(now time.Time, count uint64) bool {
	if p.began.IsZero() {
		p.began = now
	} else if count == p.count+1 && now.Sub(p.last) <= 2*lookEvery {
		p.start = now
		return true
	} else if now.Sub(p.began) > 3*p.period {
		*p = pace{period: p.period}
		return true
	}
	p.last, p.count = now, count
	return false
}

// next returns the first moment after now at which a period has just begun.
func (p *pace) next(now time.Time) time.Time {
	return now.Add(p.period - now.Sub(p.start)%p.period)
}
