package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
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

// maxPromoted bounds how many threads of one container are made real-time.
const maxPromoted = 1024

// realtime gives each group the budget that its member asks for, and each group above the
// sum of those below, in addition to what it had (MIST, section V-B). The groups above
// belong to no container alone. So their knobs are the host's.
func (f *BlockIO) realtime() error {
	sums, owners := make(map[string]time.Duration), make(map[string]container.ID)
	var expiries []time.Time
	for id, m := range f.members {
		budget, dir := m.budget, m.target.Container.Cgroup.CPU
		if budget == 0 || !m.grouped {
			continue
		}
		owners[dir] = id
		expiries = append(expiries, m.target.Expiry)
		for ; len(dir) > len(f.layout.CPU); dir = filepath.Dir(dir) {
			sums[dir] += budget
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
		budget, err := strconv.ParseInt(e.Wrote, 10, 32)
		if err != nil {
			continue
		}
		journalled[dir] = false
		for up := filepath.Dir(dir); len(up) > len(f.layout.CPU); up = filepath.Dir(up) {
			sums[up] += time.Duration(budget) * time.Microsecond
		}
	}
	// The kernel wants a group's budget to cover those below at each moment: groups above
	// grow first and shrink last.
	dirs := slices.SortedFunc(maps.Keys(sums), func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	ended := slices.SortedFunc(maps.Keys(journalled), func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	var errs []error
	for _, dir := range ended {
		if _, wanted := sums[dir]; !wanted && journalled[dir] {
			errs = append(errs, f.restore(func(e journal.Entry) bool {
				return e.Owner.Feature == name && e.Ref == cgroup.RT(dir).Ref()
			}))
		}
	}
	for _, grow := range []bool{true, false} {
		for _, dir := range dirs {
			errs = append(errs, f.budget(dir, sums[dir], grow, owners[dir], lastExpiry(expiries)))
		}
		slices.Reverse(dirs)
	}
	return errors.Join(errs...)
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

// budget sets the budget of one group, if it is to grow or shrink as said.
func (f *BlockIO) budget(dir string, add time.Duration, grow bool, id container.ID, expiry time.Time) error {
	knob := cgroup.RT(dir)
	now, err := knob.Read()
	if err != nil {
		return ignoreGone(err)
	}
	is, err := strconv.ParseInt(now, 10, 64)
	if err != nil {
		return fmt.Errorf("real-time budget of %s: %w", dir, err)
	}
	before := now
	if e, ours := f.cfg.Journal.Entry(knob.Ref()); ours && e.Owner.Feature == name && e.Ours(now) {
		before = e.Before
	}
	given, err := strconv.ParseInt(before, 10, 64)
	if err != nil || given < 0 {
		return nil // it is not bounded
	}
	want := given + add.Microseconds()
	if want == is || want > is != grow {
		return nil
	}
	by := journal.Owner{Feature: name, Container: uint64(id)}
	return ignoreGone(f.cfg.Journal.TurnUntil(knob, strconv.FormatInt(want, 10), by, expiry))
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
		if id != t.Container.ID {
			sum += m.budget
		}
	}
	if budget > 0 && sum > maxRealtime {
		return 0, false, fmt.Errorf("io.realtime: %s for all containers, of at most %s in each second", sum, maxRealtime)
	}
	return budget, grouped, nil
}

// bounded says what bounds the real-time threads of a cgroup: a group, or else the deadline
// of each. An error means that nothing does.
func (f *BlockIO) bounded(cpu string) (grouped bool, err error) {
	if !f.cfg.Deadline && cpu != "" {
		if _, err := cgroup.RT(cpu).Read(); !errors.Is(err, errors.ErrUnsupported) {
			return true, err
		}
	}
	return false, sched.TryDeadline()
}

// promote makes the threads of containers with a budget real-time: in a real-time group
// SCHED_RR of the lowest priority, else by deadlines. Their children are ordinary until the
// next call. Threads that go meanwhile, or whose group lost its budget, are left out.
func (f *BlockIO) promote() error {
	for _, m := range f.members {
		if m.budget == 0 || !m.grouped {
			continue
		}
		tids, err := cgroup.Threads(m.target.Container.Cgroup.V2, maxPromoted)
		if err != nil {
			continue
		}
		m.promoted = 0
		for _, tid := range tids {
			attr, err := unix.SchedGetAttr(tid, 0)
			if err == nil && (attr.Policy == unix.SCHED_NORMAL || attr.Policy == unix.SCHED_BATCH) {
				err = unix.SchedSetAttr(tid, &unix.SchedAttr{
					Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
				}, 0)
			}
			if err == nil {
				m.promoted++
			}
		}
		m.others = len(tids) - m.promoted
	}
	return f.deadlines()
}
