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
// weight. Where the kernel does throttle kernel threads nothing is changed.
func (n *Netcpu) weigh(c container.Container) error {
	if n.throttled {
		return nil
	}
	dir, err := charged(c)
	if err != nil {
		return err
	}
	cpus, limited, err := cgroup.CPUQuota(dir)
	if err != nil || !limited {
		return err
	}
	shares := sharesFor(cpus)
	if shares >= usualShares {
		return nil
	}
	return n.setWeight(dir, shares, c.ID)
}

// sharesFor gives the cpu.shares w with w / (w + usual) = cpus, at most the
// usual ones.
func sharesFor(cpus float64) int {
	if cpus >= 0.5 {
		return usualShares
	}
	return max(minShares, int(math.Round(usualShares*cpus/(1-cpus))))
}

// setWeight lowers the weight of a cgroup to the given cpu.shares, or to what
// corresponds to them on v2.
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
	have, err := strconv.Atoi(now)
	if err != nil {
		return errors.New(file + " holds " + strconv.Quote(now) + ", not a number")
	}
	if have <= value {
		return nil
	}
	return n.turn(k, strconv.Itoa(value), id)
}
