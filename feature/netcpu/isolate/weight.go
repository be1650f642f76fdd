package isolate

import (
	"errors"
	"math"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Weigh gives a container whose quota cannot stop its kernel threads a weight
// in proportion to that quota: beside one neighbour of the usual weight it then
// gets no more than the quota, however busy its threads are. It never raises a
// weight beyond what it found. Where the kernel does throttle kernel threads
// nothing is changed.
func (is *Isolator) Weigh(c container.Container) error {
	if is.cfg.Throttled {
		return nil
	}
	plan, err := is.weighing(c)
	if err != nil {
		return err
	}
	return is.turn(plan, c.ID)
}

// weighing is what Weigh writes on a kernel that does not throttle kernel threads.
func (is *Isolator) weighing(c container.Container) ([]journal.Setting, error) {
	dir, err := c.TenantGroup()
	if err != nil {
		return nil, err
	}
	cpus, limited, err := cgroup.CPUQuota(dir)
	if err != nil {
		return nil, err
	}
	shares := math.MaxInt32 // whatever it was
	if limited && cpus < 0.5 {
		shares = sharesFor(cpus)
	}
	return is.lowering(dir, shares, c.ID)
}

// mostWeighed is how many tenants reweigh looks at in one window, on average. Each
// takes about 0.4 ms, and a quota seldom changes.
const mostWeighed = 64

// reweigh has the weights of those that are isolated follow their quotas, and
// whether they may have queues. Where there are many, they take turns.
func (is *Isolator) reweigh() error {
	if is.cfg.Throttled {
		return nil
	}
	is.windows++
	var errs []error
	for _, t := range is.tenants {
		if !is.turnOf(t) {
			continue
		}
		c := t.members[t.owner]
		errs = append(errs, IgnoreGone(is.Weigh(c)), IgnoreGone(is.allowQueues(t, c)))
	}
	return errors.Join(errs...)
}

// turnOf says whether reweigh looks at a tenant in this window.
func (is *Isolator) turnOf(t *tenant) bool {
	turns := uint64(1 + len(is.tenants)/mostWeighed)
	return (is.windows+t.netns)%turns == 0
}

// sharesFor returns the weight w with w / (w + usual) = cpus, at most the usual one.
func sharesFor(cpus float64) int {
	if cpus >= 0.5 {
		return usualShares
	}
	return int(math.Round(usualShares * cpus / (1 - cpus)))
}

// lowering gives a cgroup the given part of the usual weight; see weight.lowered.
func (is *Isolator) lowering(dir string, shares int, id container.ID) ([]journal.Setting, error) {
	w, err := is.lookAtWeight(dir, id)
	if err != nil {
		return nil, err
	}
	return w.lowered(shares)
}
