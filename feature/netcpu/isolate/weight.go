package isolate

import (
	"errors"
	"fmt"
	"math"
	"strconv"

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
	return is.setWeight(dir, shares, c.ID)
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
		errs = append(errs, Passing(is.Weigh(c)), Passing(is.allowQueues(t, c)))
	}
	return errors.Join(errs...)
}

// usualShares is the weight of an ordinary group: weights here are in its parts, as
// cpu.shares are (kernel/sched/core.c).
const usualShares = 1024

// sharesFor returns the weight w with w / (w + usual) = cpus, at most the usual one.
func sharesFor(cpus float64) int {
	if cpus >= 0.5 {
		return usualShares
	}
	return int(math.Round(usualShares * cpus / (1 - cpus)))
}

// setWeight gives a cgroup the given part of the usual weight, but no more than its
// owner gave it.
func (is *Isolator) setWeight(dir string, shares int, id container.ID) error {
	k, takes := cgroup.WeightKnob(dir, is.v2())
	now, err := k.Read()
	if err != nil {
		return err
	}
	given := now
	e, turned := is.turned(k)
	if turned && e.Ours(now) {
		given = e.Before // what is there is our own doing
	}
	most, err := strconv.ParseUint(given, 10, 63)
	if err != nil {
		return fmt.Errorf("%s holds %q, not a number", k.Ref().Object, given)
	}
	want := given
	if value := max(takes.Least, uint64(shares)*takes.Usual/usualShares); value < most {
		want = strconv.FormatUint(value, 10)
	}
	// What is not needed here may be what another container of the pod is charged by.
	if want == now || want == given && e.Owner.Container != uint64(id) {
		return nil
	}
	return is.turn(k, want, id)
}
