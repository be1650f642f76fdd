package blockio

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Without real-time groups, each thread has a budget of its own: SCHED_DEADLINE, which the
// kernel enforces even if the agent is killed (docs/decisions/0009). The agent divides a
// container's budget among its threads each second.

// deadlinePeriod is how often a thread gets its runtime anew. A thread runs for at most its part
// of the period at a time, which is at most half of it.
const deadlinePeriod = 100 * time.Millisecond

// deadlines divides the budgets of containers without real-time groups, and makes threads
// ordinary that no longer have a part. It sets a container's refused if the kernel refuses a
// thread, and unbudgeted if a thread cannot be made ordinary.
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
		// In a real-time group promote has recorded them.
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

func owner(id container.ID) journal.Owner {
	return journal.Owner{Feature: name, Container: uint64(id)}
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
				m.own++ // by its own doing, before us
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
	// Threads that get less come first, so that the kernel has room for the others.
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
		if err := f.cfg.Journal.TurnUntil(k, value, owner(id), m.untilWhen()); ignoreGone(err) != nil {
			m.refused = err // by the kernel: this thread stays as it is
		} else if err == nil {
			m.promoted++
		}
	}
	m.others = len(tids) - m.promoted - m.own
	return err
}

// unpromoted returns why a budget has no effect. It returns nil if it has, and without threads.
func (f *BlockIO) unpromoted(m *managed) error {
	if m.budget == 0 || m.grouped || m.promoted > 0 || m.refused == nil {
		return nil
	}
	return fmt.Errorf("%w: io.realtime: %w", feature.ErrPartly, sched.ExplainDeadline(m.refused))
}

// Examine implements feature.Examiner: how this host bounds real-time threads.
func (f *BlockIO) Examine() []probe.Finding {
	if f.support.Level == probe.Unavailable {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	v, detail := probe.Verdict{Level: probe.Full}, "real-time groups of cgroup v1 (cpu.rt_runtime_us): a container's threads share its budget"
	f.tried.at = time.Time{} // whoever asks wants to know how it is now
	if grouped, err := f.bounded(f.layout.CPU); !grouped {
		detail = "SCHED_DEADLINE: a container's budget is divided among its threads"
		if err != nil {
			v = probe.Verdict{Level: probe.Unavailable, Why: "io.realtime: no real-time groups of cgroup v1, and " + err.Error(), Mend: "start the agent with CAP_SYS_NICE, and kernel.sched_rt_runtime_us above 0"}
		}
	}
	return []probe.Finding{{Capability: "io.realtime", Area: "blockio", Verdict: v, Detail: detail}}
}

// realtimes returns how the budgets of real-time containers stand. The caller holds f.mu.
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
