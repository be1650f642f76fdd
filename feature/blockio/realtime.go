package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// maxRealtime bounds the sum of all budgets, in each second of each CPU. The rest is left
// to the host and to the other containers.
const maxRealtime = 500 * time.Millisecond

const realtimeKey = "fairlead.io.realtime"

// maxPromoted bounds how many threads of one container are made real-time.
const maxPromoted = 1024

// realtime gives each group the budget that its member asks for, and each group above the
// sum of those below, in addition to what it had (MIST, section V-B). The groups above
// belong to no container alone. So their knobs are the host's. A member whose budget is not
// in force has the reason in unbudgeted. The error is about groups above.
func (f *BlockIO) realtime() error {
	sums, owners := make(map[string]time.Duration), make(map[string]container.ID)
	until := make(map[string][]time.Time)
	ask := func(dir string, budget time.Duration, expiry time.Time) {
		for ; len(dir) > len(f.layout.CPU); dir = filepath.Dir(dir) {
			sums[dir] += budget
			until[dir] = append(until[dir], expiry)
		}
	}
	for id, m := range f.members {
		if m.budget > 0 && m.grouped {
			owners[m.target.Container.Cgroup.CPU] = id
			ask(m.target.Container.Cgroup.CPU, m.budget, m.untilWhen())
		}
	}
	journalled := make(map[string]bool)
	for _, e := range f.cfg.Journal.Entries() {
		if e.Owner.Feature != name || e.Ref.Kind != cgroup.KindRT {
			continue
		}
		dir, id := filepath.Dir(e.Ref.Object), container.ID(e.Owner.Container)
		journalled[dir] = true
		if _, known := f.members[id]; id == 0 || known {
			continue
		}
		// An earlier agent's, which goes on until the agent tells of the container, or Prune.
		period, err := cgroup.RTPeriod(dir)
		value, verr := strconv.ParseInt(e.Value, 10, 32)
		before, berr := strconv.ParseInt(e.Before, 10, 32)
		if errors.Join(err, verr, berr) != nil {
			continue
		}
		journalled[dir] = false
		ask(filepath.Dir(dir), time.Duration(float64(value-before)*float64(time.Microsecond)*float64(time.Second)/float64(period)), e.Expiry)
	}
	// The kernel wants a group's budget to cover those below at each moment: groups above
	// grow first and shrink last.
	dirs := slices.SortedFunc(maps.Keys(sums), func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	ended := slices.SortedFunc(maps.Keys(journalled), func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	failed := make(map[string]error)
	for _, dir := range ended {
		if _, wanted := sums[dir]; !wanted && journalled[dir] {
			failed[dir] = f.restore(func(e journal.Entry) bool {
				return e.Owner.Feature == name && e.Ref == cgroup.RT(dir).Ref()
			})
		}
	}
	for _, grow := range []bool{true, false} {
		for _, dir := range dirs {
			failed[dir] = errors.Join(failed[dir], f.budget(dir, sums[dir], grow, owners[dir], lastExpiry(until[dir])))
		}
		slices.Reverse(dirs)
	}
	for _, m := range f.members {
		dir := m.target.Container.Cgroup.CPU
		if m.unbudgeted = failed[dir]; m.unbudgeted == nil {
			continue
		}
		delete(failed, dir)
		for up := filepath.Dir(dir); len(up) > len(f.layout.CPU); up = filepath.Dir(up) { // which may be why
			m.unbudgeted = errors.Join(failed[up], m.unbudgeted)
		}
	}
	return errors.Join(slices.Collect(maps.Values(failed))...)
}

// lastExpiry returns the last of some expiries, of which zero is never.
func lastExpiry(all []time.Time) (last time.Time) {
	for _, e := range all {
		if e.IsZero() {
			return e
		}
		if e.After(last) {
			last = e
		}
	}
	return last
}

// budget sets the budget of one group, in each second, if it is to grow or shrink as said,
// or renews what is in force.
func (f *BlockIO) budget(dir string, add time.Duration, grow bool, id container.ID, until time.Time) error {
	knob := cgroup.RT(dir)
	now, err := knob.Read()
	if err != nil {
		return ignoreGone(err)
	}
	is, err := strconv.ParseInt(now, 10, 64)
	if err != nil {
		return fmt.Errorf("real-time budget of %s: %w", dir, err)
	}
	given, err := strconv.ParseInt(f.cfg.Journal.Given(knob.Ref(), now), 10, 64)
	if err != nil || given < 0 {
		return nil // it is not bounded
	}
	period, err := cgroup.RTPeriod(dir)
	if err != nil {
		return ignoreGone(err)
	}
	// The part of a period that it is of a second, and above no less than those below have.
	part := float64(add.Microseconds()) * period.Seconds()
	if id == 0 {
		part = math.Ceil(part)
	}
	want := given + max(int64(part), 1)
	if want != is && want > is != grow || want == is && !grow {
		return nil
	}
	return ignoreGone(f.cfg.Journal.TurnUntil(knob, strconv.FormatInt(want, 10), owner(id), until))
}

func ignoreGone(err error) error {
	if errors.Is(err, journal.ErrGone) {
		return nil
	}
	return err
}

// mayRealtime returns the budget that a container gets, and whether by a real-time group; or
// why it cannot have what it asks for.
func (f *BlockIO) mayRealtime(t policy.Target, reserved []reservation) (budget time.Duration, grouped bool, err error) {
	if budget = t.Settings.Realtime; t.Settings.RealtimeAuto {
		budget, err = f.profiled(reserved)
	}
	if err == nil && budget > 0 {
		grouped, err = f.bounded(t.Container.Cgroup.CPU)
	}
	if err != nil {
		return 0, false, fmt.Errorf("io.realtime: %w", err)
	}
	sum := budget
	for id, m := range f.members {
		if id != t.Container.ID && m.helpWant == 0 { // what is decided for others gives way
			sum += m.budget
		}
	}
	if budget > 0 && sum > maxRealtime {
		return 0, false, fmt.Errorf("io.realtime: %s for all containers, of at most %s in each second", sum, maxRealtime)
	}
	return budget, grouped, nil
}

// triedFor is how long it counts what came of trying SCHED_DEADLINE.
const triedFor = time.Minute

// bounded says what bounds the real-time threads of a cgroup: a group, or else the deadline
// of each. An error means that nothing does.
func (f *BlockIO) bounded(cpu string) (grouped bool, err error) {
	if !f.cfg.Deadline && cpu != "" {
		if _, err := cgroup.RT(cpu).Read(); !errors.Is(err, errors.ErrUnsupported) {
			return true, err
		}
	}
	if now := time.Now(); now.Sub(f.tried.at) > triedFor {
		f.tried.at, f.tried.err = now, sched.TryDeadline()
	}
	return false, f.tried.err
}

// promote makes the threads of containers with a budget real-time: in a real-time group
// SCHED_RR of the lowest priority, else by deadlines. Their children are ordinary until the
// next call. Threads that go meanwhile, or whose group lost its budget, are left out.
//
// A thread of a group that had a budget before is noted, because it may stay real-time
// when that is back. Where it had none, the kernel takes the budget back from ordinary
// threads only, and cgroup.RT makes them that.
func (f *BlockIO) promote() {
	for id, m := range f.members {
		if m.budget == 0 || !m.grouped || m.unbudgeted != nil {
			continue
		}
		if m.turning != nil {
			m.promoted, m.others = int(m.turning.promoted.Load()), 0
			continue
		}
		dir := m.target.Container.Cgroup.V2
		tids, err := cgroup.Threads(dir, maxPromoted)
		if err != nil {
			continue
		}
		e, _ := f.cfg.Journal.Entry(cgroup.RT(m.target.Container.Cgroup.CPU).Ref(), name)
		m.promoted = 0
		var ordinary []sched.Thread
		for _, tid := range tids {
			attr, err := unix.SchedGetAttr(tid, 0)
			switch {
			case err != nil:
			case attr.Policy != unix.SCHED_NORMAL && attr.Policy != unix.SCHED_BATCH:
				m.promoted++
			default:
				if t, err := sched.FindTask(f.cfg.Roots.Proc, tid); err == nil {
					ordinary = append(ordinary, t)
				}
			}
		}
		for _, t := range m.still(ordinary) {
			knob := sched.Deadline(f.cfg.Roots.Proc, t)
			if e.Before == "0" {
				err = knob.Write(sched.RoundRobin)
			} else {
				err = f.cfg.Journal.TurnUntil(knob, sched.RoundRobin, owner(id), m.untilWhen())
			}
			if err == nil {
				m.promoted++
			}
		}
		m.others = len(tids) - m.promoted
	}
	f.deadlines()
}

// untilWhen is when the budget of a container lapses: as what asks for it does.
func (m *member) untilWhen() time.Time {
	if m.helpWant > 0 {
		return m.target.Until(helpKey)
	}
	return m.target.Until(realtimeKey)
}

// still gives those of some threads that are the container's. They were found by their
// numbers, which may have become others' between two steps; a Thread is known by its start,
// too, and one that is listed now was the container's when it was found, or has ended.
func (m *member) still(threads []sched.Thread) []sched.Thread {
	if len(threads) == 0 {
		return nil
	}
	tids, err := cgroup.Threads(m.target.Container.Cgroup.V2, maxPromoted)
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(threads, func(t sched.Thread) bool { return !slices.Contains(tids, t.TID) })
}

// realtimePriority is that of our threads, the lowest.
const realtimePriority = 1

// promoted makes an ordinary thread SCHED_RR, and says whether it is real-time then.
func promoted(tid int) bool {
	attr, err := unix.SchedGetAttr(tid, 0)
	if err == nil && (attr.Policy == unix.SCHED_NORMAL || attr.Policy == unix.SCHED_BATCH) {
		err = unix.SchedSetAttr(tid, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: realtimePriority, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
		}, 0)
	}
	return err == nil
}
