package netcpu

import (
	"errors"
	"math"
	"path/filepath"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// The bounds of cpu.shares (v1) and cpu.weight (v2), kernel/sched/sched.h and
// kernel/sched/core.c.
const (
	minShares, usualShares, maxShares = 2, 1024, 262144
	minWeight, usualWeight, maxWeight = 1, 100, 10000
)

// weigh gives a container whose quota cannot stop its kernel threads a weight
// in proportion to that quota: beside one neighbour of the usual weight it then
// gets no more than the quota, however busy its threads are. It never raises a
// weight beyond what it found. Where the kernel does throttle kernel threads
// nothing is changed.
func (n *Netcpu) weigh(c container.Container) error {
	if n.throttled {
		return nil
	}
	dir, err := charged(c)
	if err != nil {
		return err
	}
	cpus, limited, err := cgroup.CPUQuota(dir)
	if err != nil {
		return err
	}
	shares := usualShares
	if limited {
		shares = sharesFor(cpus)
	}
	if shares == usualShares {
		shares = maxShares // whatever it was
	}
	return n.setWeight(dir, shares, c.ID)
}

// reweigh has the weights of those that are isolated follow their quotas, and
// whether they may have queues.
func (n *Netcpu) reweigh() error {
	if n.throttled {
		return nil
	}
	var errs []error
	for _, t := range n.tenants {
		c := t.members[t.owner]
		errs = append(errs, passing(n.weigh(c)), passing(n.allowQueues(t, c)))
	}
	return errors.Join(errs...)
}

// sharesFor gives the cpu.shares w with w / (w + usual) = cpus, at most the
// usual ones.
func sharesFor(cpus float64) int {
	if cpus >= 0.5 {
		return usualShares
	}
	return max(minShares, int(math.Round(usualShares*cpus/(1-cpus))))
}

// setWeight gives a cgroup the given cpu.shares, or what corresponds to them on
// v2, but no more than its owner gave it.
func (n *Netcpu) setWeight(dir string, shares int, id container.ID) error {
	file, value := filepath.Join(dir, "cpu.shares"), shares
	if n.layout.CPU == n.layout.V2 {
		file, value = filepath.Join(dir, "cpu.weight"), max(minWeight, shares*usualWeight/usualShares)
	}
	k := cgroup.File(file)
	now, err := k.Read()
	if err != nil {
		return err
	}
	given := now
	e, turned := n.cfg.Journal.Entry(k.Ref())
	if turned && e.Owner.Feature == name && e.Ours(now) {
		given = e.Before // what is there is our own doing
	}
	most, err := strconv.Atoi(given)
	if err != nil {
		return errors.New(file + " holds " + strconv.Quote(given) + ", not a number")
	}
	want := given
	if value < most {
		want = strconv.Itoa(value)
	}
	// What is not needed here may be what another container of the pod is charged by.
	if want == now || want == given && e.Owner.Container != uint64(id) {
		return nil
	}
	return n.turn(k, want, id)
}
