package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// maxPromoted bounds how many threads of one container are made real-time.
const maxPromoted = 1024

// realtimeState is the real-time state of one container. Budgets are per second of each CPU.
type realtimeState struct {
	kept       time.Duration                  // reserved for it, and its maximum (io.realtime); 0: it gets what others leave
	budget     time.Duration                  // of its real-time threads
	unbudgeted error                          // why the budget is not in force
	grouped    bool                           // a real-time group bounds it, not the deadlines of its threads
	helpWant   time.Duration                  // the budget that its help asks for
	turning    *turning                       // nil: its threads take no turns
	ran        map[sched.Thread]time.Duration // CPU time of its threads a second ago
	promoted   int                            // threads made real-time
	others     int                            // threads left ordinary
	own        int                            // threads that were real-time without us
	refused    error                          // why the kernel left a thread ordinary
}

// realtime gives each group the budget that its container asks for, and each parent group the sum of
// its children, on top of its own earlier budget (MIST, section V-B). A parent group belongs to no
// single container, so the host owns its knob. If a container's budget is not in force, its unbudgeted
// says why. The error is about parent groups.
func (f *BlockIO) realtime() error {
	sums, owners := make(map[string]time.Duration), make(map[string]container.ID)
	until := make(map[string][]time.Time)
	ask := func(dir string, budget time.Duration, expiry time.Time) {
		for ; len(dir) > len(f.layout.CPU); dir = filepath.Dir(dir) {
			sums[dir] += budget
			until[dir] = append(until[dir], expiry)
		}
	}
	for id, m := range f.managed {
		if m.budget > 0 && m.grouped {
			owners[m.target.Container.Cgroup.CPU] = id
			ask(m.target.Container.Cgroup.CPU, m.budget, m.target.Until(helpKey))
		}
	}
	journalled := make(map[string]bool)
	for _, e := range f.cfg.Journal.Entries() {
		if e.Owner.Feature != name || e.Ref.Kind != cgroup.KindRT {
			continue
		}
		dir, id := filepath.Dir(e.Ref.Object), container.ID(e.Owner.Container)
		journalled[dir] = true
		if _, known := f.managed[id]; id == 0 || known {
			continue
		}
		// An earlier agent set this one. It stays until Apply for the container, or Prune.
		period, err := cgroup.RTPeriod(dir)
		value, verr := strconv.ParseInt(e.Value, 10, 32)
		before, berr := strconv.ParseInt(e.Before, 10, 32)
		if errors.Join(err, verr, berr) != nil {
			continue
		}
		journalled[dir] = false
		ask(filepath.Dir(dir), time.Duration(float64(value-before)*float64(time.Microsecond)*float64(time.Second)/float64(period)), e.Expiry)
	}
	// The kernel requires that a group's budget covers its children at every moment, so parents grow first
	// and shrink last.
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
	for _, m := range f.managed {
		dir := m.target.Container.Cgroup.CPU
		if m.unbudgeted = failed[dir]; m.unbudgeted == nil {
			continue
		}
		delete(failed, dir)
		for up := filepath.Dir(dir); len(up) > len(f.layout.CPU); up = filepath.Dir(up) { // a parent's failure may be the cause
			m.unbudgeted = errors.Join(failed[up], m.unbudgeted)
		}
	}
	return errors.Join(slices.Collect(maps.Values(failed))...)
}

// lastExpiry returns the last of some expiries. Zero is never.
func lastExpiry(all []time.Time) time.Time {
	if len(all) == 0 || slices.ContainsFunc(all, time.Time.IsZero) {
		return time.Time{}
	}
	return slices.MaxFunc(all, time.Time.Compare)
}

// budget adds add, per second, to the budget of one group, if that is a change in the direction of
// grow, or renews the expiry.
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
	// add is per second, the knob per period. Parents round up, so that they cover their children.
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

// triedFor is how long a successful trial of SCHED_DEADLINE counts.
const triedFor = time.Minute

// bounded returns true if a real-time group bounds the threads of a cgroup, and false if their
// deadlines do. The error says why neither does.
func (f *BlockIO) bounded(cpu string) (grouped bool, err error) {
	if !f.cfg.Deadline && cpu != "" {
		if _, err := cgroup.RT(cpu).Read(); !errors.Is(err, errors.ErrUnsupported) {
			return true, err
		}
	}
	if now := time.Now(); f.tried.err != nil || now.Sub(f.tried.at) > triedFor {
		f.tried.at, f.tried.err = now, sched.TryDeadline()
	}
	return false, f.tried.err
}

// promote makes the threads of containers with a budget real-time: SCHED_RR at the lowest priority in a
// real-time group, else SCHED_DEADLINE. Their children are ordinary until the next call. promote skips
// threads that end meanwhile, or lose their group's budget.
//
// The journal records the threads of a group that had a budget before, because they could stay
// real-time once that budget is restored. Where the group had none, the kernel takes the budget back
// only when all threads are ordinary, and cgroup.RT makes them so.
func (f *BlockIO) promote() {
	for id, m := range f.managed {
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
		ordinary, _ = m.still(ordinary)
		for _, t := range ordinary {
			knob := sched.Deadline(f.cfg.Roots.Proc, t)
			if e.Before == "0" {
				err = knob.Write(sched.RoundRobin)
			} else {
				err = f.cfg.Journal.TurnUntil(knob, sched.RoundRobin, owner(id), m.target.Until(helpKey))
			}
			if err == nil {
				m.promoted++
			}
		}
		m.others = len(tids) - m.promoted
	}
	f.deadlines()
}

// still returns the threads that belong to the container. A TID may have been reused between two steps,
// but a Thread also has its start time. So a thread whose TID is listed now was the container's when it
// was found, or has ended.
func (m *managed) still(threads []sched.Thread) ([]sched.Thread, error) {
	if len(threads) == 0 {
		return nil, nil
	}
	tids, err := cgroup.Threads(m.target.Container.Cgroup.V2, maxPromoted)
	return slices.DeleteFunc(threads, func(t sched.Thread) bool { return !slices.Contains(tids, t.TID) }), err
}

// realtimePriority is the priority of our threads, the lowest.
const realtimePriority = 1

// promoted makes an ordinary thread SCHED_RR. It reports whether the thread is real-time afterwards.
func promoted(tid int) bool {
	attr, err := unix.SchedGetAttr(tid, 0)
	if err == nil && (attr.Policy == unix.SCHED_NORMAL || attr.Policy == unix.SCHED_BATCH) {
		err = unix.SchedSetAttr(tid, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: realtimePriority, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
		}, 0)
	}
	return err == nil
}

// Without real-time groups, each thread gets a separate budget: SCHED_DEADLINE, which the kernel
// enforces even if the agent is killed (docs/decisions/0009). The agent divides a container's budget
// among its threads each second.

// deadlinePeriod is the period of SCHED_DEADLINE, after which a thread's runtime is renewed. A thread
// runs for at most its runtime at a time, which is at most half of the period.
const deadlinePeriod = 100 * time.Millisecond

// deadlines divides the budgets of containers without real-time groups, and makes threads ordinary that
// no longer get a share. It sets a container's refused if the kernel refuses a thread, and unbudgeted
// if a thread cannot be made ordinary.
func (f *BlockIO) deadlines() {
	left := make(map[container.ID][]journal.Entry)
	for _, e := range f.cfg.Journal.Entries() {
		if e.Owner.Feature == name && e.Ref.Kind == sched.KindDeadline {
			id := container.ID(e.Owner.Container)
			left[id] = append(left[id], e)
		}
	}
	for id, m := range f.managed {
		was := left[id]
		if m.budget > 0 && !m.grouped {
			if err := f.deadlinesOf(id, m, was); err != nil {
				m.refused = err
			}
			continue
		}
		m.ran = nil
		// In a real-time group, promote has recorded these threads.
		was = slices.DeleteFunc(was, func(e journal.Entry) bool { return m.budget > 0 && e.Value == sched.RoundRobin })
		if len(was) == 0 {
			continue
		}
		if err := f.restore(func(e journal.Entry) bool {
			return e.Ref.Kind == sched.KindDeadline && e.Owner == owner(id) && (m.budget == 0 || e.Value != sched.RoundRobin)
		}); err != nil {
			m.unbudgeted = err
		}
	}
}

func (f *BlockIO) deadlinesOf(id container.ID, m *managed, was []journal.Entry) error {
	proc := f.cfg.Roots.Proc
	tids, err := cgroup.Threads(m.target.Container.Cgroup.V2, maxPromoted)
	if err != nil {
		return ignoreGone(err)
	}
	ours := keyed(was, func(e journal.Entry) journal.Ref { return e.Ref })
	ran := make(map[sched.Thread]time.Duration)
	var all []decide.Thread
	m.promoted, m.own, m.refused = 0, 0, nil
	var found []sched.Thread
	for _, tid := range tids {
		if t, err := sched.FindTask(proc, tid); err == nil {
			found = append(found, t)
		} else if ignoreGone(err) != nil {
			return err
		}
	}
	if found, err = m.still(found); err != nil {
		return ignoreGone(err)
	}
	for _, t := range found {
		value, err := sched.Deadline(proc, t).Read()
		if ignoreGone(err) != nil {
			return err
		} else if err != nil {
			continue
		}
		s := decide.Thread{TID: t.TID, Start: t.Start}
		if run, period, ok := sched.ParseDeadline(value); ok {
			e, is := ours[sched.Deadline(proc, t).Ref()]
			if !is || !e.Ours(value) {
				m.own++ // the container made it so before us
				continue
			}
			s.Has = run * time.Second / period
		} else if !sched.Ordinary(value) {
			m.own++
			continue
		}
		if ran[t], err = sched.Ran(proc, t.TID); ignoreGone(err) != nil {
			return err
		} else if err != nil {
			continue
		}
		if before, seen := m.ran[t]; seen {
			s.Ran = ran[t] - before
		}
		all = append(all, s)
	}
	m.ran = ran
	shares := decide.DivideRuntime(m.budget, runtime.NumCPU(), all)
	// Threads whose runtime shrinks come first, to make room for the others.
	slices.SortFunc(shares, func(a, b decide.Thread) int { return cmp.Compare(a.Gets-a.Has, b.Gets-b.Has) })
	wanted := make(map[journal.Ref]bool)
	for _, s := range shares {
		wanted[sched.Deadline(proc, sched.Thread{TID: s.TID, Start: s.Start}).Ref()] = true
	}
	if slices.ContainsFunc(was, func(e journal.Entry) bool { return !wanted[e.Ref] }) {
		err = f.restore(func(e journal.Entry) bool {
			return e.Ref.Kind == sched.KindDeadline && e.Owner == owner(id) && !wanted[e.Ref]
		})
	}
	for _, s := range shares {
		k := sched.Deadline(proc, sched.Thread{TID: s.TID, Start: s.Start})
		value := sched.FormatDeadline(s.Gets*deadlinePeriod/time.Second, deadlinePeriod)
		if err := f.cfg.Journal.TurnUntil(k, value, owner(id), m.target.Until(helpKey)); ignoreGone(err) != nil {
			m.refused = err // the kernel refused: this thread stays as it is
		} else if err == nil {
			m.promoted++
		}
	}
	m.others = len(tids) - m.promoted - m.own
	return err
}

// unpromoted returns why a budget has no effect; nil if it has one, or if there are no threads.
func (f *BlockIO) unpromoted(m *managed) error {
	if m.kept > 0 && m.helpWant == 0 && len(m.reserved) == 0 {
		return fmt.Errorf("%w: io.realtime is for whom a reservation is missed (io.reserve), or for io.help=realtime", feature.ErrPartly)
	}
	if m.budget == 0 || m.grouped || m.promoted > 0 || m.refused == nil {
		return nil
	}
	return fmt.Errorf("%w: io.realtime: %w", feature.ErrPartly, sched.ExplainDeadline(m.refused))
}

// Examine implements feature.Examiner: how this host bounds real-time threads.
func (f *BlockIO) Examine() []probe.Finding {
	if f.Verdict.Level == probe.Unavailable {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v, detail := probe.Verdict{Level: probe.Full}, "real-time groups of cgroup v1 (cpu.rt_runtime_us): a container's threads share its budget"
	f.tried.at = time.Time{} // an explicit question deserves a fresh trial
	if grouped, err := f.bounded(f.layout.CPU); !grouped {
		detail = "SCHED_DEADLINE: a container's budget is divided among its threads"
		if err != nil {
			v = probe.Verdict{Level: probe.Unavailable, Why: "io.realtime: no real-time groups of cgroup v1, and " + err.Error(), Mend: "start the agent with CAP_SYS_NICE, and kernel.sched_rt_runtime_us above 0"}
		}
	}
	return []probe.Finding{{Capability: "io.realtime", Area: "blockio", Verdict: v, Detail: detail}}
}

// realtimes returns the state of the budgets. The caller holds f.mu.
func (f *BlockIO) realtimes() (out []api.BlockIORealtime) {
	for id, m := range f.managed {
		if m.budget == 0 {
			continue
		}
		r := api.BlockIORealtime{
			Container: api.ID(id), Name: m.target.Container.Name, Budget: m.budget.Seconds(), Auto: m.target.Settings.RealtimeAuto, Way: "groups",
			Promoted: m.promoted, Others: m.others, Own: m.own,
		}
		if !m.grouped {
			r.Way = "deadline"
		}
		if m.refused != nil {
			r.Refused = sched.ExplainDeadline(m.refused).Error()
		}
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b api.BlockIORealtime) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	return out
}
