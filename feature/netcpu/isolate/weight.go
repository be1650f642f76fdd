package isolate

import (
	"errors"
	"math"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Weigh sets the weight of a container in proportion to its quota, if the quota cannot throttle kernel
// threads. Beside one neighbour of default weight the container then gets no more than its quota,
// however busy its threads are. Weigh never raises a weight above its owner's. It returns the quota in
// CPUs; 0: none. If the kernel throttles kernel threads, it changes nothing and returns 0.
func (is *Isolator) Weigh(c container.Container) (quota float64, err error) {
	if is.cfg.Throttled {
		return 0, nil
	}
	dir, err := c.TenantGroup()
	if err != nil {
		return 0, err
	}
	if quota, err = is.quota(c); err != nil {
		return 0, err
	}
	most, err := is.weightOf(dir)
	if err != nil {
		return 0, err
	}
	knob, takes := cgroup.WeightKnob(dir, is.v2())
	want := max(takes.Least, uint64(sharesFor(quota))*takes.Usual/usualShares)
	if want >= most { // undo only c's entry: another container of the pod may need its own
		return quota, is.restore(func(e journal.Entry) bool { return e.Owner == is.by(c.ID) && e.Ref == knob.Ref() })
	}
	return quota, is.turn([]journal.Setting{{Knob: knob, Value: strconv.FormatUint(want, 10)}}, is.owns(c.ID))
}

// heed applies the quota of a tenant's payer: to its weight, and to whether it may own queues.
func (is *Isolator) heed(s *isolation, c container.Container) error {
	quota, err := is.Weigh(c)
	if err != nil {
		return err
	}
	return is.allowQueues(s, c, quota)
}

// quota returns the quota that the owner of a tenant's cgroup has set, in CPUs; 0: none.
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

// sharesFor returns the weight w with w / (w + usual) = cpus. For a CPU or more, and for 0, which is no
// quota, it returns the largest weight.
func sharesFor(cpus float64) int {
	if cpus == 0 || cpus >= 1 {
		return math.MaxInt32
	}
	return int(min(math.Round(usualShares*cpus/(1-cpus)), math.MaxInt32))
}
