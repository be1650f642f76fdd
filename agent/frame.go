package agent

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
)

// overviewEvery is the time over which an overview is made, and between two of them.
const overviewEvery = 5 * time.Second

// Frame returns all reports as of one moment, with the containers that run. It leaves out the
// report of a feature that does not answer, or has none.
func (a *Agent) Frame(ctx context.Context) (api.Frame, error) {
	f := api.Frame{Taken: a.pace.now()}
	f.Containers, _ = a.Containers(ctx) // from memory: it does not fail
	for _, x := range a.all {
		r, ok := x.(feature.Reporter)
		if !ok {
			continue
		}
		out, _ := readBy(a.fence(x), "report", func() any {
			if out, err := r.Report(context.WithoutCancel(ctx), nil, api.Ask{Feature: x.Name()}); err == nil {
				return out
			}
			return nil
		})
		f.Take(out)
	}
	return f, nil
}

// Overview returns how the containers stood when it was last computed. It has no rows until the
// agent has run for the time of one overview.
func (a *Agent) Overview(context.Context) (api.Overview, error) {
	a.viewing.Lock()
	defer a.viewing.Unlock()
	if a.overview.Rows == nil {
		return api.Overview{Since: a.started, Taken: a.started, Rows: []api.OverviewRow{}}, nil
	}
	return a.overview, nil
}

// watchOverview computes the overview at the agent's pace, until ctx ends.
func (a *Agent) watchOverview(ctx context.Context) {
	tick := time.NewTicker(a.pace.view)
	defer tick.Stop()
	last, _ := a.Frame(ctx) // what does not answer is left out
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f, _ := a.Frame(ctx)
		a.recorder.take(f)
		out := f.After(last)
		a.viewing.Lock()
		a.overview = out
		a.viewing.Unlock()
		last = f
	}
}

// maxSlowdowns limits the series of slowed_by_ratio on the metrics page.
const maxSlowdowns = 500

// slowed returns the samples of an overview: of every container, and the largest losses by cause and
// culprit.
func slowed(o api.Overview) feature.Snapshot {
	s := feature.Snapshot{Taken: o.Taken, Help: map[string]string{
		"slowed_ratio":    "How much slower the container runs because of its neighbours: 1 minus its speed by its speed without them.",
		"slowed_by_ratio": "The part of slowed_ratio by cause and culprit; the culprit is unknown where it is the host, or nobody saw it.",
	}}
	var by []feature.Sample
	for _, row := range o.Rows {
		s.Samples = append(s.Samples, feature.Sample{Container: container.ID(row.Container), Name: "slowed_ratio", Value: row.Slowed})
		for _, x := range row.By {
			culprit := feature.Label{Name: "culprit", Value: "unknown"}
			if x.Culprit != 0 {
				culprit = feature.Label{Name: "culprit", Container: container.ID(x.Culprit)}
			}
			by = append(by, feature.Sample{
				Container: container.ID(row.Container), Name: "slowed_by_ratio", Value: x.Slowed,
				Labels: []feature.Label{{Name: "cause", Value: x.Cause}, culprit},
			})
		}
	}
	slices.SortStableFunc(by, func(x, y feature.Sample) int { return cmp.Compare(y.Value, x.Value) })
	s.Samples = append(s.Samples, by[:min(len(by), maxSlowdowns)]...)
	return s
}
