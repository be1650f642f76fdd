package agent

import (
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
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

// fill puts into an account what the scheduler has counted of its container since
// the accounts began.
func (u *usages) fill(x *api.NetCPUAccount, dirs container.Cgroup) {
	u.mu.Lock()
	was := u.before[x.Container]
	u.mu.Unlock()
	now := usageOf(dirs)
	x.Tasks = grown(now.tasks, was.tasks).Seconds()
	x.Throttled = grown(now.throttled, was.throttled).Seconds()
	x.Periods = grown(now.periods, was.periods)
}

// grown is how much a counter has grown. One that has become smaller is that of
// another control group, which the container was moved to.
func grown[N time.Duration | uint64](now, before N) N {
	if now < before {
		return now
	}
	return now - before
}
