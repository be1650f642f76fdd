package charge

import "time"

// pace finds the starts of the bandwidth periods of a cgroup, by reading their count at several
// moments. Their phase stays the same for the life of the cgroup: neither a write of the quota nor
// a pause moves it (kernel/sched/fair.c forwards the timer by whole periods).
type pace struct {
	period time.Duration
	start  time.Time // just after one; zero: not known
	began  time.Time // the search
	last   time.Time // the last look
	count  uint64    // of periods at that time
}

// saw records a look at the count of periods, and reports whether now is a moment to write: one has
// just begun, or none was seen to begin. No task runs then, so that no periods are counted, or looks
// come late on a busy CPU.
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
