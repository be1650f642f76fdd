package netcpu

import (
	"cmp"
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// usage holds the scheduler's counters of a container since its cgroup was created. A counter that
// cannot be read is zero, most often because the container is ending.
type usage struct {
	tasks, throttled time.Duration
	periods          uint64
	waited           time.Duration // for a CPU, while none of its tasks ran
	counted          bool          // the kernel counts these waits
	quota            float64       // the present one, in CPUs; 0: none
	lost, active     time.Duration // those of waits, since the first reading
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

// usages holds the usage at the start of the accounts for containers that are older than them. The
// zero value is ready.
type usages struct {
	mu    sync.Mutex
	of    map[container.ID]*known
	files cgroup.Files // of running containers
	left  int          // threads that this round may still read
}

// known is a container's usage at the start of the accounts, and its waits since the first reading.
type known struct {
	before usage
	waits  waits
}

// begin records the present usage of a container that is older than start, when the accounts began.
// A second call for the same container changes nothing.
func (u *usages) begin(c container.Container, start time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.of == nil {
		u.of = make(map[container.ID]*known)
	}
	if u.of[c.ID] != nil {
		return
	}
	u.of[c.ID] = new(known)
	if !c.Started.After(start) {
		u.of[c.ID].before = usageOf(nil, c.Cgroup)
	}
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
	maps.DeleteFunc(u.of, func(id container.ID, _ *known) bool { return !runs[id] })
	u.files.Keep(dirs)
	u.left = maxRead
}

// since returns the scheduler's counters of a container since the accounts began. It reads the
// container's threads below proc, unless that is "".
func (u *usages) since(c container.Container, proc string) usage {
	u.mu.Lock()
	defer u.mu.Unlock()
	of := cmp.Or(u.of[c.ID], new(known)) // a concurrent reader may have forgotten the container
	was, now, w := of.before, usageOf(&u.files, c.Cgroup), &of.waits
	if now.counted {
		w.next(time.Now(), now, runtime.NumCPU(), func() threads { return u.threads(proc, c.Cgroup.V2) }, cpusOf)
		now.lost, now.active = w.lost, w.active
	}
	now.tasks, now.throttled, now.waited = grown(now.tasks, was.tasks), grown(now.throttled, was.throttled), grown(now.waited, was.waited)
	now.periods = grown(now.periods, was.periods)
	return now
}

// threads reads the threads of a container, within the bound of the round.
func (u *usages) threads(proc, dir string) threads {
	if proc == "" {
		return nil
	}
	list := threadsOf(proc, dir, min(maxThreads, u.left))
	u.left -= len(list)
	return list
}

// grown returns the growth of a counter. A smaller value means that the container was moved to
// another cgroup, so all of it is growth.
func grown[N time.Duration | uint64](now, before N) N {
	if now < before {
		return now
	}
	return now - before
}
