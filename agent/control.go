package agent

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// decisionFor is how long a decision counts, and with it the changes on the host
// that it caused, if nobody renews it. Each renewal rewrites the container's
// entries of the journal.
const decisionFor = 5 * time.Minute

// controller applies what the feature of w decides, at the agent's pace, until ctx ends.
func (a *Agent) controller(ctx context.Context, w *worker, d feature.Decider) {
	tick := time.NewTicker(a.pace.decide)
	defer tick.Stop()
	failed := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.deciding.Begin()
		var err error
		panicked := w.fence.turn("decisions", func() { err = a.control(d) })
		w.deciding.End()
		switch {
		case panicked != nil: // the log says so
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Warn("nothing new is decided", "feature", w.feature.Name(), "err", err)
		}
	}
}

// control applies the decisions of one moment.
func (a *Agent) control(by feature.Decider) error {
	a.mu.Lock()
	complete := a.complete
	targets := a.ordered
	a.mu.Unlock()
	decisions, err := by.Decide(targets, complete)
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
	return err
}

// decision returns the decision in force for the container and key of d.
func (a *Agent) decision(d policy.Decision) policy.Decision {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.decisions[choice{d.Container, d.Key}]
}

// adopt continues the decisions of an agent that was killed, before a round
// undoes what they have changed. They lapse, which distinguishes them from what
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
		w.fence.call(place{op: "adopt"}, func() error {
			for _, d := range by.Adopt(left) {
				a.decisions[choice{d.Container, d.Key}] = d
			}
			return nil
		})
	}
}
