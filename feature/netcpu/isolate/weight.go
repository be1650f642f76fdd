package isolate

import (
	"errors"
	"math"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Weigh sets the weight of a container in proportion to its quota if the quota cannot stop its
// kernel threads: beside one neighbour of the usual weight it then gets no more than the quota,
// however busy its threads are. It never raises a weight above the one it found. If the kernel
// throttles kernel threads it changes nothing.
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

// weighing returns what Weigh writes on a kernel that does not throttle kernel threads.
func (is *Isolator) weighing(c container.Container) ([]journal.Setting, error) {
	dir, err := c.TenantGroup()
	if err != nil {
		return nil, err
	}
	cpus, err := is.quota(c)
	if err != nil {
		return nil, err
	}
	w, err := is.lookAtWeight(dir, c.ID)
	if err != nil {
		return nil, err
	}
	return w.lowered(sharesFor(cpus))
}

// quota returns the limit of a container's tenant by its owner, in CPUs; 0: none.
func (is *Isolator) quota(c container.Container) (cpus float64, err error) {
	dir, err := c.TenantGroup()
	if err != nil {
		return 0, err
	}
	b, _, err := cgroup.GivenBandwidth(is.cfg.Journal, dir, is.v2())
	if errors.Is(err, errors.ErrUnsupported) {
		return 0, nil
	}
	if err != nil || !b.Limited {
		return 0, err
	}
	return float64(b.Quota) / float64(b.Period), nil
}

// reweigh updates the weights of isolated containers, and whether they may have queues, to their
// quotas. If there are many, they take turns.
func (is *Isolator) reweigh() error {
	if is.cfg.Throttled {
		return nil
	}
	is.windows++
	var errs []error
	for _, s := range is.isolated {
		if !is.turnOf(s) {
			continue
		}
		errs = append(errs, IgnoreGone(is.Weigh(s.payer)), IgnoreGone(is.allowQueues(s, s.payer)))
	}
	return errors.Join(errs...)
}

// turnOf reports whether reweigh looks at a tenant in this window.
func (is *Isolator) turnOf(s *isolation) bool {
	turns := uint64(1 + len(is.isolated)/mostWeighed)
	return (is.windows+s.of.Key().NetNS)%turns == 0
}

// sharesFor returns the weight w with w / (w + usual) = cpus; any for a CPU or more, and for 0, which
// is no quota.
func sharesFor(cpus float64) int {
	if cpus == 0 || cpus >= 1 {
		return math.MaxInt32
	}
	return int(min(math.Round(usualShares*cpus/(1-cpus)), math.MaxInt32))
}
