package agent

import (
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// status is the state of the worker's feature for one container.
func (w *worker) status(id container.ID) api.FeatureStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := api.FeatureStatus{Feature: w.feature.Name(), State: api.StatePending}
	r := w.rows[id]
	if r == nil {
		return s
	}
	s.Since, s.Tries = r.since, r.tries
	switch {
	case errors.Is(r.err, feature.ErrPartly):
		s.State, s.Error = api.StatePartly, api.Text(r.err)
	case r.err != nil:
		s.State, s.Error, s.Next = api.StateError, api.Text(r.err), r.due
	case r.settled:
		s.State = api.StateDone
	}
	if what := w.hang(); what != "" && w.busy == r {
		s.State, s.Error = api.StateError, what
	} else if what != "" && s.State == api.StatePending {
		s.Error = "it waits: " + what
	}
	return s
}

// withRefused adds to the result of an Apply which labels do not count for keys of the
// feature: without them a Target is in force in part only.
func withRefused(name string, t policy.Target, err error) error {
	for _, p := range t.Refused {
		if policy.FeatureOf(p.Key) == name {
			err = partly(err, p.Key+": "+p.Reason)
		}
	}
	return err
}

// partly adds a part that is not in force to the result of an Apply; an error stays as it is.
func partly(err error, what string) error {
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", feature.ErrPartly, what)
	case errors.Is(err, feature.ErrPartly):
		return fmt.Errorf("%w; %s", err, what)
	}
	return err
}

// totals counts the containers by state.
func (w *worker) totals() api.Feature {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := api.Feature{Name: w.feature.Name(), Support: wireVerdict(w.fence.verdict(w.feature)), Prune: api.Text(w.prune.err)}
	for _, r := range w.rows {
		switch {
		case r.err != nil && !r.settled, w.busy == r && w.hang() != "":
			t.Failed++
		case errors.Is(r.err, feature.ErrPartly):
			t.Partly++
		case r.settled:
			t.Done++
		default:
			t.Pending++
		}
	}
	return t
}

// statuses returns the state of every feature for one container.
func (a *Agent) statuses(t policy.Target) []api.FeatureStatus {
	id := t.Container.ID
	a.mu.Lock()
	held, keeper := a.heldAll || a.held[id], a.kept[id]
	a.mu.Unlock()
	out := []api.FeatureStatus{}
	for _, f := range a.all {
		w := a.worker(f.Name())
		switch v := a.fence(f).verdict(f); {
		case w == nil || v.Level == probe.Unavailable:
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateUnavailable, Error: v.Why})
		case held && !w.has(id):
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateHeld})
		case keeper != "" && !w.has(id):
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateKept, Error: keeper + ", which knows the container, does not answer"})
		default:
			out = append(out, w.status(id))
		}
	}
	return out
}

// featureTotals returns the state of each feature on this host.
func (a *Agent) featureTotals() []api.Feature {
	out := []api.Feature{}
	for _, f := range a.all {
		if w := a.worker(f.Name()); w != nil {
			out = append(out, w.totals())
		} else {
			out = append(out, api.Feature{Name: f.Name(), Support: wireVerdict(f.Support())})
		}
	}
	return out
}
