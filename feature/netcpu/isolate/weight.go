package isolate

import (
	"errors"
	"math"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
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
	dir, err := c.TenantGroup()
	if err != nil {
		return err
	}
	cpus, limited, err := cgroup.CPUQuota(dir)
	if err != nil {
		return err
	}
	shares := math.MaxInt32 // whatever it was
	if limited && cpus < 0.5 {
		shares = sharesFor(cpus)
	}
	return is.lower(dir, shares, c.ID)
}

// reweigh has the weights of those that are isolated follow their quotas, and
// whether they may have queues.
func (is *Isolator) reweigh() error {
	if is.cfg.Throttled {
		return nil
	}
	var errs []error
	for _, t := range is.tenants {
		c := t.members[t.owner]
		errs = append(errs, IgnoreGone(is.Weigh(c)), IgnoreGone(is.allowQueues(t, c)))
	}
	return errors.Join(errs...)
}

// sharesFor returns the weight w with w / (w + usual) = cpus, at most the usual one.
func sharesFor(cpus float64) int {
	if cpus >= 0.5 {
		return usualShares
	}
	return int(math.Round(usualShares * cpus / (1 - cpus)))
}

// lower gives a cgroup the given part of the usual weight; see weight.lowered.
func (is *Isolator) lower(dir string, shares int, id container.ID) error {
	w, err := is.lookAtWeight(dir, id)
	if err != nil {
		return err
	}
	plan, err := w.lowered(shares)
	if err != nil {
		return err
	}
	return is.turn(plan, id)
}
