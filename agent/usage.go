package agent

import (
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// usage is what the scheduler has counted of a container since there is its
// control group. What cannot be read, most often since the container is just
// ending, is zero.
type usage struct {
	tasks, throttled time.Duration
	periods          uint64
}

func usageOf(dirs container.Cgroup) (u usage) {
	if dirs.V2 != "" {
		if d, err := cgroup.Usage(dirs.V2); err == nil {
			u.tasks = d
		}
	}
	if dirs.CPU != "" {
		if d, n, err := cgroup.Throttled(dirs.CPU); err == nil {
			u.throttled, u.periods = d, n
		}
	}
	return u
}

// usages knows what containers that ran before the agent had used by then: the
// accounts do not begin before it. Its zero value is ready.
type usages struct {
	mu     sync.Mutex
	before map[container.ID]usage
}

// saw notes those of running that are not known yet and are older than since, and
// forgets those that have ended.
func (u *usages) saw(running []container.Container, since time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	before := make(map[container.ID]usage)
	for _, c := range running {
		was, known := u.before[c.ID]
		if !known && !c.Started.After(since) {
			was = usageOf(c.Cgroup)
		}
		before[c.ID] = was
	}
	u.before = before
}

// since is what the scheduler has counted of a container since the accounts began.
func (u *usages) since(id container.ID, dirs container.Cgroup) usage {
	u.mu.Lock()
	was := u.before[id]
	u.mu.Unlock()
	now := usageOf(dirs)
	return usage{grown(now.tasks, was.tasks), grown(now.throttled, was.throttled), grown(now.periods, was.periods)}
}

// fill puts it into an account.
func (u *usages) fill(x *api.NetCPUAccount, dirs container.Cgroup) {
	of := u.since(x.Container, dirs)
	x.Tasks, x.Throttled, x.Periods = of.tasks.Seconds(), of.throttled.Seconds(), of.periods
}

// snapshot puts it into samples for the metrics page.
//
//	netcpu_tasks_seconds_total      CPU time that the container's control group was
//	                                charged for
//	netcpu_throttled_seconds_total  time that its own quota kept it from a CPU
func (u *usages) snapshot(running []container.Container, now time.Time) feature.Snapshot {
	s := feature.Snapshot{Taken: now}
	for _, c := range running {
		of := u.since(c.ID, c.Cgroup)
		if of.tasks == 0 {
			continue // unknown: it has just ended
		}
		s.Samples = append(s.Samples,
			feature.Sample{Container: c.ID, Name: "netcpu_tasks_seconds_total", Value: of.tasks.Seconds()},
			feature.Sample{Container: c.ID, Name: "netcpu_throttled_seconds_total", Value: of.throttled.Seconds()})
	}
	return s
}

// grown is how much a counter has grown. One that has become smaller is that of
// another control group, which the container was moved to.
func grown[N time.Duration | uint64](now, before N) N {
	if now < before {
		return now
	}
	return now - before
}
