package agent

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// decisionFor is for how long a decision counts, and with it what it has changed
// on the host, if nobody renews it. Each renewal writes the journal's entries
// of the container anew.
const decisionFor = 5 * time.Minute

// controller makes what a feature decides count, at the agent's pace, until ctx
// ends.
func (a *Agent) controller(ctx context.Context, name string, d feature.Decider) {
	tick := time.NewTicker(a.pace.decide)
	defer tick.Stop()
	failed := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := a.control(d)
		switch {
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Warn("nothing new is decided", "feature", name, "err", err)
		}
	}
}

// control makes the decisions of one moment count.
func (a *Agent) control(by feature.Decider) error {
	a.mu.Lock()
	complete := a.complete
	targets := slices.SortedFunc(maps.Values(a.resolved), func(x, y policy.Target) int { return cmp.Compare(x.Container.ID, y.Container.ID) })
	a.mu.Unlock()
	decisions, err := by.Decide(targets, complete)
	if err != nil {
		return err
	}
	now := a.pace.now()
	for _, d := range decisions {
		if d.Expiry.IsZero() {
			d.Expiry = now.Add(decisionFor)
		}
		old := a.decision(d)
		if old.Value == d.Value && old.Since.Equal(d.Since) && old.Expiry.Sub(now) > d.Expiry.Sub(now)/2 {
			continue
		}
		a.Decide(d)
	}
	return nil
}

// decision returns the one that stands in the place of d.
func (a *Agent) decision(d policy.Decision) policy.Decision {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.decisions[choice{d.Container, d.Key}]
}

// adopt makes the decisions of an agent that was killed count on, before a round
// takes back what they have changed. They lapse, which tells that from what
// policy itself asked for.
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
		for _, d := range by.Adopt(left) {
			a.decisions[choice{d.Container, d.Key}] = d
		}
	}
}
