package netcpu

import (
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// usage is the scheduler's counters of a container since its cgroup was created. A counter that
// cannot be read, most often because the container is just ending, is zero.
type usage struct {
	tasks, throttled time.Duration
	periods          uint64
	waited           time.Duration // for a CPU, while none of its tasks ran
	counted          bool          // the kernel counts these waits
	quota            float64       // now, in CPUs; 0: none
	lost, active     time.Duration // as of waits, since the first reading
}

func usageOf(files *cgroup.Files, dirs container.Cgroup) (u usage) {
	if dirs.V2 != "" {
		if d, err := files.Usage(dirs.V2); err == nil {
			u.tasks = d
		}
		if d, err := files.Waited(dirs.V2); err == nil {
			u.waited, u.counted = d, true
		}
	}
	if dirs.CPU != "" {
		if d, n, err := files.Throttled(dirs.CPU); err == nil {
			u.throttled, u.periods = d, n
		}
		if cpus, limited, err := files.CPUQuota(dirs.CPU); err == nil && limited {
			u.quota = cpus
		}
	}
	return u
}

// usages holds the usage, at the start of the accounts, of containers that are older. Its zero
// value is ready.
type usages struct {
	mu     sync.Mutex
	before map[container.ID]usage
	files  cgroup.Files // of running containers
	waits  map[container.ID]*waits
	left   int // threads that may still be read in this round
}

// begin records the present usage of a container that is older than the accounts, which began at
// start. A second call for a container changes nothing.
func (u *usages) begin(c container.Container, start time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.before == nil {
		u.before = make(map[container.ID]usage)
	}
	if _, known := u.before[c.ID]; known {
		return
	}
	var was usage
	if !c.Started.After(start) {
		was = usageOf(nil, c.Cgroup)
	}
	u.before[c.ID] = was
}

// only calls begin for all running containers, and forgets the others.
func (u *usages) only(running []container.Container, start time.Time) {
	runs, dirs := make(map[container.ID]bool, len(running)), make(map[string]bool, 2*len(running))
	for _, c := range running {
		runs[c.ID], dirs[c.Cgroup.V2], dirs[c.Cgroup.CPU] = true, true, true
		u.begin(c, start)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.before, func(id container.ID, _ usage) bool { return !runs[id] })
	maps.DeleteFunc(u.waits, func(id container.ID, _ *waits) bool { return !runs[id] })
	u.files.Keep(dirs)
	u.left = maxRead
}

// since returns the scheduler's counters of a container since the accounts began. proc is where
// threads are read, "" for nowhere.
func (u *usages) since(c container.Container, proc string) usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	was, now := u.before[c.ID], usageOf(&u.files, c.Cgroup)
	if now.counted {
		w := u.waits[c.ID]
		if w == nil {
			w = &waits{}
			if u.waits == nil {
				u.waits = make(map[container.ID]*waits)
			}
			u.waits[c.ID] = w
		}
		w.next(time.Now(), now, runtime.NumCPU(), func() threads { return u.threads(proc, c.Cgroup.V2) }, cpusOf)
		now.lost, now.active = w.lost, w.active
	}
	now.tasks, now.throttled, now.waited = grown(now.tasks, was.tasks), grown(now.throttled, was.throttled), grown(now.waited, was.waited)
	now.periods = grown(now.periods, was.periods)
	return now
}

// threads reads the threads of a container, as long as the round has any left.
func (u *usages) threads(proc, dir string) threads {
	if proc == "" {
		return nil
	}
	list := threadsOf(proc, dir, min(maxThreads, u.left))
	u.left -= len(list)
	return list
}

// grown returns the growth of a counter. A smaller value is another cgroup's, which the container
// was moved to.
func grown[N time.Duration | uint64](now, before N) N {
	if now < before {
		return now
	}
	return now - before
}
