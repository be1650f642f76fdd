package agent

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// A round looks at all containers, and each container that starts requests a few rounds. So that a
// burst does not cost the square of its size, the pause after a round is at least roundRest times
// its duration. On a host with few containers that is milliseconds.
const (
	roundRest = 4
	mostRest  = time.Second
)

// loop makes a round whenever there may be a reason to, until ctx ends.
func (a *Agent) loop(ctx context.Context) {
	refresh := time.NewTicker(refreshTime)
	defer refresh.Stop()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	patience := time.NewTimer(readyTime)
	defer patience.Stop()
	ready, complete := a.cfg.Ready, false
	for ctx.Err() == nil {
		// Requested before the round, so that no change is lost.
		changed := a.set.Changed()
		began := time.Now()
		if complete = a.round(); complete && ready != nil {
			ready()
			ready = nil
		}
		rest := time.After(min(roundRest*time.Since(began), mostRest))
	idle:
		for {
			a.alive()
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-a.kick:
			case <-refresh.C:
			case <-patience.C:
				if !complete {
					a.log.Warn("not every source of containers has answered yet")
				}
				if ready != nil {
					ready()
					ready = nil
				}
			case <-beat.C:
				if !a.lapsed() {
					continue
				}
			}
			break idle
		}
		select {
		case <-ctx.Done():
		case <-rest:
		}
	}
}

// hung is the time after which a loop with turns of milliseconds counts as hanging.
const hung = 30 * time.Second

// watched is a loop that the protection of containers depends on.
type watched struct {
	name string
	busy func() time.Time // start of its present turn; zero: it waits

	bound time.Duration // time limit of a turn, if longer than hung
	told  time.Time     // start of the turn that the log has reported
}

// watch lists the loops beside the agent's own: that of the Set, without which the agent would use
// its last list forever; those of the features; and those that make decisions.
func (a *Agent) watch() {
	a.watched = []*watched{{name: "the list of containers", busy: a.set.Busy}}
	for _, w := range a.workers {
		for _, loop := range w.feature.Loops() {
			a.watched = append(a.watched, &watched{name: w.feature.Name() + ", " + loop.Name, busy: loop.Busy, bound: loop.Bound})
		}
		a.watched = append(a.watched, &watched{name: w.feature.Name() + ", decisions", busy: w.deciding.Busy})
	}
}

// alive signals that the agent works, unless a loop hangs. A feature that hangs in a call for one
// container does not stop the signal: the log and the container's status report it.
func (a *Agent) alive() {
	alive := true
	for _, w := range a.workers {
		if what, since := w.hangs(); what != "" && !since.Equal(a.hung[w]) {
			a.hung[w] = since
			a.log.Error("a feature hangs: nothing else is applied or removed until it goes on", "feature", w.feature.Name(), "call", what)
		}
	}
	for _, l := range a.watched {
		since := l.busy()
		if since.IsZero() || a.pace.now().Sub(since) <= max(hung, l.bound) {
			continue
		}
		alive = false
		if !since.Equal(l.told) {
			l.told = since
			a.log.Error("a loop hangs: no sign of life is given until it goes on", "loop", l.name, "since", since)
		}
	}
	if alive && a.cfg.Alive != nil {
		a.cfg.Alive()
	}
}

// round updates the workers' lists, and reports whether it saw every container. It calls no feature
// itself.
func (a *Agent) round() (complete bool) {
	a.rounding.Lock()
	defer a.rounding.Unlock()
	// Also for a request: if its server recovered a panic here, the round would stay half done.
	defer func() {
		if value := recover(); value != nil {
			end(value)
		}
	}()
	began := time.Now()
	snap := a.set.Snapshot()
	a.say(snap.Sources)
	a.remember(snap.Known) // before anything depends on it
	a.forget(snap)
	targets, problems := a.policy.Resolve(snap.Containers)
	byID := make(map[container.ID]policy.Target, len(targets))
	for _, t := range targets {
		byID[t.Container.ID] = t
	}
	kept, strange := a.keep(snap), false
	now := a.pace.now()

	a.mu.Lock()
	for id := range kept {
		if was := a.resolved[id]; known(was) {
			byID[id] = was
		} else {
			strange = true
		}
	}
	a.resolved = maps.Clone(byID)
	a.ordered = slices.SortedFunc(maps.Values(byID), func(x, y policy.Target) int { return cmp.Compare(x.Container.ID, y.Container.ID) })
	a.decide(byID, snap.Complete, now)
	a.targets, a.problems, a.complete, a.kept = byID, problems, snap.Complete, kept
	a.whole = a.whole || snap.Complete || now.Sub(a.started) > readyTime
	wanted := make(map[container.ID]*policy.Target, len(byID))
	for id, t := range byID {
		if !a.whole && t.Container.Source == container.CgroupSource {
			// Its runtime may not have reported its labels yet. An earlier agent may have put in
			// force what they ask for, and this round would undo it.
			continue
		}
		if kept[id] != "" && !known(t) {
			continue
		}
		if !a.heldAll && !a.held[id] {
			wanted[id] = &t
			if was := a.wanted[id]; reflect.DeepEqual(was, &t) {
				wanted[id] = was // compared here, once for all workers
			}
		}
	}
	for id := range a.held {
		if _, runs := byID[id]; !runs {
			delete(a.held, id)
		}
	}
	a.mu.Unlock()

	a.wanted = wanted
	a.rewritten.follow(wanted)
	for _, w := range a.workers {
		// Prune would treat containers that are in kept but not in wanted as ended.
		w.want(wanted, snap.Complete && !strange)
	}
	if snap.Complete {
		a.sweep(byID, now)
		a.settle(now)
	}
	a.lapse(now)

	a.mu.Lock()
	a.rounds.made++
	a.rounds.took += time.Since(began)
	a.mu.Unlock()
	return snap.Complete
}

// sweep undoes the journal entries of ended containers that no worker handles: a killed agent left
// them, or a feature forgot them. Changes of an earlier agent for running containers are adopted:
// Apply finds them in place. Their entry may belong to an ended container of the same pod, so the
// features first get the time to adopt it. sweep also undoes changes of features that have no
// worker here.
func (a *Agent) sweep(alive map[container.ID]policy.Target, now time.Time) {
	late := now.Sub(a.started) >= readyTime
	left := func(e journal.Entry) bool {
		w := a.worker(e.Owner.Feature)
		if w == nil {
			return true
		}
		id := container.ID(e.Owner.Container)
		_, runs := alive[id]
		return id != 0 && !runs && !w.has(id) && (late || w.adopted())
	}
	if err := kernel.Tidy(a.cfg.Roots, a.undo(left)); err != nil {
		a.log.Warn("left by containers that have ended", "err", err)
	}
}

// settle detaches the programs that this agent has inherited and not replaced. It first gives every
// feature the time to replace them.
func (a *Agent) settle(now time.Time) {
	if now.Sub(a.started) < readyTime && slices.ContainsFunc(a.workers, func(w *worker) bool { return !w.adopted() }) {
		return
	}
	if err := a.disinherit(); err != nil {
		a.log.Warn("packets may be handled twice", "err", err)
	}
}

// tell logs the outcomes of a restore.
func (a *Agent) tell(out []journal.Outcome) {
	for _, o := range out {
		e := o.Entry
		args := []any{"kind", e.Ref.Kind, "object", e.Ref.Object, "container", e.Owner.Container, "before", e.Before, "wrote", e.Wrote}
		switch o.Result {
		case journal.Failed:
			a.log.Error("value not restored", append(args, "err", o.Err)...)
		case journal.Foreign:
			a.log.Warn("value was changed by someone else: left alone", append(args, "now", o.Value)...)
		default:
			a.log.Info("value restored", append(args, "result", o.Result)...)
		}
	}
}

// reload reads the policy again and logs the result.
func (a *Agent) reload() {
	a.policy.Reload() // Status has the error
	a.policyChanged()
}

// policyChanged ends all holds of Restore, and requests a round.
func (a *Agent) policyChanged() {
	st := a.policy.Status()
	switch {
	case st.Err == nil:
		a.keepPolicy()
		a.log.Info("policy loaded", "dir", st.Dir, "files", len(st.Files), "policies", st.Policies)
	case st.LastSuccess.IsZero():
		a.log.Error("policy is not usable, and there is no last good one: neither files nor labels are in force", "dir", st.Dir, "err", st.Err)
	default:
		a.log.Error("policy is not usable; the last good one stays in force", "dir", st.Dir, "err", st.Err)
	}
	a.mu.Lock()
	a.heldAll = false
	clear(a.held)
	a.mu.Unlock()
	a.nudge()
}

func (a *Agent) worker(feature string) *worker {
	for _, w := range a.workers {
		if w.feature.Name() == feature {
			return w
		}
	}
	return nil
}
