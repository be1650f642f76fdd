package agent

import (
	"context"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature"
)

// overviewEvery is the time over which an overview is made, and between two of them.
const overviewEvery = 5 * time.Second

// Frame returns all reports as of one moment, with the containers that run. It leaves out the
// report of a feature that does not answer, or has none.
func (a *Agent) Frame(ctx context.Context) (api.Frame, error) {
	f := api.Frame{Taken: a.pace.now()}
	var err error
	if f.Containers, err = a.Containers(ctx); err != nil {
		return f, err
	}
	for _, x := range a.all {
		r, ok := x.(feature.Reporter)
		if !ok {
			continue
		}
		read := func() any {
			out, err := r.Report(context.WithoutCancel(ctx), nil, api.Ask{Feature: x.Name()})
			if err != nil {
				return nil
			}
			return out
		}
		if w := a.worker(x.Name()); w == nil { // unsupported here, but it may have a report
			f.Take(read())
		} else if out, ok := readBy(w.reports, read); ok {
			f.Take(out)
		}
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
	last, err := a.Frame(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f, failed := a.Frame(ctx)
		if failed != nil {
			continue
		}
		a.recorder.take(f)
		if err == nil {
			out := f.After(last)
			a.viewing.Lock()
			a.overview = out
			a.viewing.Unlock()
		}
		last, err = f, nil
	}
}
