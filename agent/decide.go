package agent

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// lapseGrace is how long a journal entry may outlive its expiry while a feature still works on its
// container. In that time the next round drops the decision, and the feature undoes or renews the
// change.
const lapseGrace = time.Minute

// choice is what a controller decides about.
type choice struct {
	container container.ID
	key       string
}

// Decide makes a controller's decision override policy, from the next round until it lapses or is
// replaced. A decision that has already lapsed withdraws the earlier one. It is safe for concurrent
// use.
func (a *Agent) Decide(d policy.Decision) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.decisions[choice{d.Container, d.Key}] = d
	a.nudge()
}

// decide merges the current decisions into the targets. With complete, the targets are those of all
// running containers. The caller holds a.mu.
func (a *Agent) decide(targets map[container.ID]policy.Target, complete bool, now time.Time) {
	by := make(map[container.ID][]policy.Decision)
	for c, d := range a.decisions {
		_, runs := targets[c.container]
		switch {
		case d.Lapsed(now), !runs && complete:
			delete(a.decisions, c)
		case runs:
			by[c.container] = append(by[c.container], d)
		}
	}
	for id, ds := range by {
		slices.SortFunc(ds, func(x, y policy.Decision) int { return cmp.Compare(x.Key, y.Key) })
		t, err := targets[id].With(ds, now)
		if err != nil {
			a.log.Warn("a controller's decision is not usable", "container", id, "err", err)
		}
		targets[id] = t
	}
}

// lapse undoes the journal's entries beyond their expiry, and notes when the next
// decision or entry lapses.
func (a *Agent) lapse(now time.Time) {
	a.undo(func(e journal.Entry) bool {
		w := a.worker(e.Owner.Feature)
		// An entry of the host may serve any container: its worker counts.
		has := w != nil && (e.Owner.Container == 0 || w.has(container.ID(e.Owner.Container)))
		return e.Expired(now) && (!has || now.Sub(e.Expiry) >= lapseGrace)
	})
	var next time.Time
	first := func(t time.Time) {
		if t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	for _, e := range a.journal.Entries() {
		if !e.Expiry.IsZero() {
			first(e.Expiry)
			first(e.Expiry.Add(lapseGrace))
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, d := range a.decisions {
		first(d.Expiry)
	}
	a.lapses = next
}

// undo restores the entries that match, and logs the outcomes.
func (a *Agent) undo(match func(journal.Entry) bool) (out []journal.Outcome) {
	if slices.ContainsFunc(a.journal.Entries(), match) { // making an Opener is worthwhile only if there is an entry
		out, _ = a.journal.Restore(a.opener(), match) // the outcomes contain the errors
		a.tell(out)
	}
	return out
}

// lapsed reports whether anything has lapsed since the last round.
func (a *Agent) lapsed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.lapses.IsZero() && !a.lapses.After(a.pace.now())
}

// decisionFor is how long a decision, and the changes it caused on the host, last without renewal.
// Each renewal rewrites the journal entries of the container.
const decisionFor = 5 * time.Minute

// urgencies is how often, per interval between decisions, a feature is asked whether one is urgent.
const urgencies = 5

// controller applies what the feature of w decides, at the agent's pace, until ctx ends.
func (a *Agent) controller(ctx context.Context, w *worker, d feature.Decider) {
	tick := time.NewTicker(a.pace.decide / urgencies)
	defer tick.Stop()
	hurries, _ := d.(feature.Urgent)
	mine := make(map[choice]bool)
	failed := ""
	for turn := 1; ; turn++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.deciding.Begin()
		var err error
		now := turn%urgencies == 0
		panicked := w.fence.turn("decisions", func() {
			if now = now || hurries != nil && hurries.Urgent(); now {
				err = a.control(d, mine)
			}
		})
		w.deciding.End()
		switch {
		case panicked != nil, !now: // the log has the panic; otherwise the feature was not asked
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Warn("nothing new is decided", "feature", w.feature.Name(), "err", err)
		}
	}
}

// control applies the decisions of one moment. It withdraws the earlier decisions in mine that no
// longer stand, and updates mine.
func (a *Agent) control(by feature.Decider, mine map[choice]bool) error {
	a.mu.Lock()
	complete := a.complete
	targets := a.ordered
	a.mu.Unlock()
	decisions, err := by.Decide(targets, complete)
	now := a.pace.now()
	stand := make(map[choice]bool, len(decisions))
	for _, d := range decisions {
		stand[choice{d.Container, d.Key}] = true
		mine[choice{d.Container, d.Key}] = true
		if d.Expiry.IsZero() {
			d.Expiry = now.Add(decisionFor)
		}
		old := a.decision(d)
		if old.Value == d.Value && old.Since.Equal(d.Since) && old.Expiry.Sub(now) > d.Expiry.Sub(now)/2 {
			continue
		}
		a.Decide(d)
	}
	if err == nil {
		a.withdraw(targets, complete, mine, stand)
	}
	return err
}

// withdraw ends the decisions in mine that no longer stand. If the targets are incomplete, it ends
// only decisions for containers among them.
func (a *Agent) withdraw(targets []policy.Target, complete bool, mine, stand map[choice]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range mine {
		if !stand[c] && (complete || slices.ContainsFunc(targets, func(t policy.Target) bool { return t.Container.ID == c.container })) {
			delete(mine, c)
			delete(a.decisions, c)
			a.nudge()
		}
	}
}

// decision returns the decision in force for the container and key of d.
func (a *Agent) decision(d policy.Decision) policy.Decision {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.decisions[choice{d.Container, d.Key}]
}

// adopt continues the decisions of an agent that was killed, before a round undoes what they
// changed. A journal entry with an expiry comes from a decision; one without comes from policy.
func (a *Agent) adopt() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.workers {
		by, ok := w.feature.(feature.Decider)
		if !ok {
			continue
		}
		left := slices.DeleteFunc(a.journal.Entries(), func(e journal.Entry) bool {
			return e.Expiry.IsZero() || e.Owner.Feature != w.feature.Name()
		})
		w.fence.call(place{op: "adopt"}, func() error {
			for _, d := range by.Adopt(left) {
				a.decisions[choice{d.Container, d.Key}] = d
			}
			return nil
		})
	}
}
