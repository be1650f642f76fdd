package isolate

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// A flooded container takes CPU time by its tasks and by the uplinks' threads. It takes more than its
// weight allows if a neighbour got less per weight and waited for a CPU. That limits the CPU time that
// is due to the container, whatever its quota.

// group holds the CPU time of a tenant's cgroup, in total or in some time.
type group struct {
	members     []container.Container
	weight      uint64        // set by its owner; 0: it only runs on idle CPUs
	ran, waited time.Duration // on and for a CPU
	quota       float64       // CPUs; 0: none
}

// short returns the growth of the counters since an earlier reading, and whether the tenant went short
// of CPU time meanwhile. A tenant that used its whole quota did not go short, however long it waited.
// A counter that has fallen belongs to another cgroup, so it has not grown.
func (g group) short(before group, length time.Duration) (group, bool) {
	g.ran, g.waited = max(0, g.ran-before.ran), max(0, g.waited-before.waited)
	had := g.quota > 0 && float64(g.ran) >= (1-law.Least)*g.quota*float64(length)
	return g, !had && float64(g.waited) >= law.Least*float64(length)
}

// due returns the part of took, the CPU time of a container, that its weight allows beside groups that
// go short; 0 if there are none. It takes away what makes the container equal to the best served of
// these groups, per weight. The next look shows whether that was enough for the others. It takes away
// no more time than all of them waited.
func due(took time.Duration, weight uint64, short []group) time.Duration {
	var best group
	var waited time.Duration
	for _, g := range short {
		if g.weight == 0 {
			continue
		}
		waited += g.waited
		if best.weight == 0 || float64(g.ran)*float64(best.weight) > float64(best.ran)*float64(g.weight) {
			best = g
		}
	}
	if best.weight == 0 {
		return 0
	}
	excess := (float64(took)*float64(best.weight) - float64(best.ran)*float64(weight)) / float64(weight+best.weight)
	return max(1, took-min(time.Duration(excess), waited))
}

// around holds the last look at all tenants.
type around struct {
	at     time.Time
	groups map[string]group // by directory, in the hierarchy of the cpu controller
	files  cgroup.Files
}

// lookAround updates the CPU time due to each tenant from what all tenants got since the last look.
func (is *Isolator) lookAround(now time.Time) error {
	length := now.Sub(is.around.at)
	if length < law.Window {
		return nil
	}
	before := is.around.groups
	errs := []error{is.readGroups(now)}
	short := make(map[string]group)
	for dir, g := range is.around.groups {
		last, known := before[dir]
		if g, goes := g.short(last, length); goes && known && length <= 2*law.Window {
			weight, err := is.weightOf(dir)
			errs = append(errs, err)
			if g.weight = weight; !apart(g.members, is.cpus()) {
				short[dir] = g
			}
		}
	}
	for _, s := range is.isolated {
		took := s.took
		s.took, s.due = 0, 0
		dir, err := s.payer.TenantGroup()
		if err != nil {
			continue
		}
		others := maps.Clone(short)
		delete(others, dir)
		if len(others) == 0 {
			continue
		}
		weight, err := is.weightOf(dir)
		errs = append(errs, err)
		s.due = due(took, weight, slices.Collect(maps.Values(others))).Seconds() / length.Seconds()
	}
	return errors.Join(errs...)
}

// forgetAround forgets the last look at the neighbours.
func (is *Isolator) forgetAround() {
	is.around.files.Keep(nil)
	is.around = around{}
	for _, s := range is.isolated {
		s.due = 0
	}
}

// weightOf returns the weight that the owner of a cgroup has set. It is also 0 if the cgroup has gone or
// has no cpu controller.
func (is *Isolator) weightOf(dir string) (uint64, error) {
	weight, _, err := cgroup.GivenWeight(is.cfg.Journal, dir, is.v2())
	return weight, IgnoreGone(err)
}

// readGroups reads the counters of all tenants for which the kernel has them.
func (is *Isolator) readGroups(now time.Time) error {
	r := &is.around
	r.at, r.groups = now, make(map[string]group)
	dirs := make(map[string]bool)
	var errs []error
	for _, t := range is.cfg.Tenants.Tenants() {
		for _, m := range t.Members() {
			dir, err := m.Container.TenantGroup()
			counts := m.Container.TenantUsageGroup()
			if err != nil || counts == "" {
				continue
			}
			if dirs[dir] {
				if g, read := r.groups[dir]; read {
					g.members = append(g.members, m.Container)
					r.groups[dir] = g
				}
				continue
			}
			dirs[dir], dirs[counts] = true, true
			g := group{members: []container.Container{m.Container}}
			if g.ran, err = r.files.Usage(counts); err == nil {
				if g.waited, err = r.files.Waited(counts); err == nil {
					g.quota, _, err = r.files.CPUQuota(dir)
				}
			}
			switch {
			case err == nil:
				r.groups[dir] = g
			case !errors.Is(err, journal.ErrGone) && !errors.Is(err, errors.ErrUnsupported):
				errs = append(errs, err)
			}
		}
	}
	r.files.Keep(dirs)
	return errors.Join(errs...)
}

// apart reports whether containers may use none of the CPUs, and so lose nothing there.
func apart(list []container.Container, cpus []int) bool {
	return len(cpus) > 0 && !slices.ContainsFunc(list, func(c container.Container) bool {
		may, err := cgroup.CPUs(c.Cgroup.CPUSet)
		return err != nil || slices.ContainsFunc(may, func(cpu int) bool { return slices.Contains(cpus, cpu) })
	})
}
