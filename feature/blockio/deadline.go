package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// Where the kernel has no real-time groups, each thread has a budget of its own instead:
// SCHED_DEADLINE, which the kernel throttles by itself, whatever becomes of the agent
// (docs/decisions/0009). A container's budget is divided among its threads each second.

// deadlinePeriod is how often a thread gets its runtime anew. No thread holds a CPU for
// longer than its part of that, half of it at the most.
const deadlinePeriod = 100 * time.Millisecond

const (
	// mostDeadlines bounds the threads of one container that get a part of its budget:
	// those that ran most.
	mostDeadlines = 64
	// leastShare is the least that a thread gets in each second. The kernel takes no less
	// than a microsecond in each period.
	leastShare = 100 * time.Microsecond
)

// threadShare is a thread's part of its container's budget, in each second.
type threadShare struct {
	thread sched.Thread
	ran    time.Duration // in the last second
	has    time.Duration // what it has now; 0: it is ordinary
	gets   time.Duration
}

// divideRuntime divides a budget, in each second of each CPU, among the threads of a
// container: those that ran most, by max-min fairness of twice what each ran, so that one
// that is held up finds its level; and what that leaves among all of them. A thread runs on one CPU
// at a time, so that it gets no more than the budget of one. One that has nearly what it
// is to get keeps it.
func divideRuntime(budget time.Duration, cpus int, all []threadShare) []threadShare {
	total := budget * time.Duration(cpus)
	slices.SortStableFunc(all, func(a, b threadShare) int { return cmp.Compare(b.ran, a.ran) })
	n := min(len(all), mostDeadlines, int(total/leastShare))
	out := slices.Clone(all[:n])
	left := total
	for i := n - 1; i >= 0; i-- { // those that want least come first
		want := min(max(2*out[i].ran, leastShare), budget)
		out[i].gets = min(want, left/time.Duration(i+1))
		left -= out[i].gets
	}
	for i := range out {
		more := min(left/time.Duration(n-i), budget-out[i].gets)
		out[i].gets += more
		left -= more
	}
	var sum time.Duration
	kept := slices.Clone(out)
	for i, s := range kept {
		if s.has <= budget && s.has > s.gets*3/4 && s.has < s.gets*5/4 {
			kept[i].gets = s.has
		}
		sum += kept[i].gets
	}
	if sum <= total {
		return kept
	}
	return out
}

// deadlines divides the budgets of containers without real-time groups, and makes threads
// ordinary that have no part of one any more. What a member cannot have is in
// refused, and in unbudgeted what could not be taken back.
func (f *BlockIO) deadlines() {
	left := make(map[container.ID][]journal.Entry)
	for _, e := range f.cfg.Journal.Entries() {
		if e.Owner.Feature == name && e.Ref.Kind == sched.KindDeadline {
			id := container.ID(e.Owner.Container)
			left[id] = append(left[id], e)
		}
	}
	for id, m := range f.members {
		was := left[id]
		if m.budget > 0 && !m.grouped {
			if err := f.deadlinesOf(id, m, was); err != nil {
				m.refused = err
			}
			continue
		}
		m.ran = nil
		// Of a group they are those that promote has noted.
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

func (f *BlockIO) deadlinesOf(id container.ID, m *member, was []journal.Entry) error {
	proc := f.cfg.Roots.Proc
	tids, err := cgroup.Threads(m.target.Container.Cgroup.V2, maxPromoted)
	if err != nil {
		return ignoreGone(err)
	}
	ours := make(map[journal.Ref]journal.Entry)
	for _, e := range was {
		ours[e.Ref] = e
	}
	ran := make(map[sched.Thread]time.Duration)
	var all []threadShare
	m.promoted, m.own, m.refused = 0, 0, nil
	var found []sched.Thread
	for _, tid := range tids {
		if t, err := sched.FindTask(proc, tid); err == nil {
			found = append(found, t)
		}
	}
	for _, t := range m.still(found) {
		value, err := sched.Deadline(proc, t).Read()
		if err != nil {
			continue
		}
		s := threadShare{thread: t}
		if run, period, ok := sched.ParseDeadline(value); ok {
			e, is := ours[sched.Deadline(proc, t).Ref()]
			if !is || !e.Ours(value) {
				m.own++ // by its own doing: it had the right before us
				continue
			}
			s.has = run * time.Second / period
		} else if !sched.Ordinary(value) {
			m.own++
			continue
		}
		if ran[t], err = sched.Ran(proc, t.TID); err != nil {
			continue
		}
		if before, seen := m.ran[t]; seen {
			s.ran = ran[t] - before
		}
		all = append(all, s)
	}
	m.ran = ran
	shares := divideRuntime(m.budget, runtime.NumCPU(), all)
	// Those that get less come first, so that the kernel has room for the others.
	slices.SortFunc(shares, func(a, b threadShare) int { return cmp.Compare(a.gets-a.has, b.gets-b.has) })
	wanted := make(map[journal.Ref]bool)
	for _, s := range shares {
		wanted[sched.Deadline(proc, s.thread).Ref()] = true
	}
	var errs []error
	if slices.ContainsFunc(was, func(e journal.Entry) bool { return !wanted[e.Ref] }) {
		errs = append(errs, f.restore(func(e journal.Entry) bool {
			return e.Ref.Kind == sched.KindDeadline && e.Owner == owner(id) && !wanted[e.Ref]
		}))
	}
	for _, s := range shares {
		k := sched.Deadline(proc, s.thread)
		value := sched.FormatDeadline(s.gets*deadlinePeriod/time.Second, deadlinePeriod)
		if err := f.cfg.Journal.TurnUntil(k, value, owner(id), m.untilWhen()); ignoreGone(err) != nil {
			m.refused = err // by the kernel: this thread stays as it is
		} else if err == nil {
			m.promoted++
		}
	}
	m.others = len(tids) - m.promoted - m.own
	return errors.Join(errs...)
}

// unpromoted says why a container's budget has no effect; nil: it has, or it has no threads.
func (f *BlockIO) unpromoted(t policy.Target) error {
	m := f.members[t.Container.ID]
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
	v, detail := probe.Verdict{Level: probe.Full}, "real-time groups of cgroup v1 (cpu.rt_runtime_us): a container's threads share its budget"
	if !f.hasGroups() {
		detail = "SCHED_DEADLINE: a container's budget is divided among its threads"
		if err := sched.TryDeadline(); err != nil {
			v = probe.Verdict{Level: probe.Unavailable, Why: "io.realtime: no real-time groups of cgroup v1, and " + err.Error(), Mend: "start the agent with CAP_SYS_NICE, and kernel.sched_rt_runtime_us above 0"}
		}
	}
	return []probe.Finding{{Capability: "io.realtime", Area: "blockio", Verdict: v, Detail: detail}}
}

// hasGroups says whether this host bounds real-time threads by groups.
func (f *BlockIO) hasGroups() bool {
	if f.cfg.Deadline || f.layout.CPU == "" || f.layout.CPU == f.layout.V2 {
		return false
	}
	_, err := cgroup.RT(f.layout.CPU).Read()
	return err == nil
}

// realtimes says how the budgets of real-time containers stand. The caller holds f.mu.
func (f *BlockIO) realtimes() (out []api.BlockIORealtime) {
	for id, m := range f.members {
		if m.budget == 0 {
			continue
		}
		r := api.BlockIORealtime{
			Container: id, Name: m.target.Container.Name, Budget: m.budget.Seconds(), Auto: m.target.Settings.RealtimeAuto, Way: "groups",
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
