// Package view is what the terminal view (package view/tui) and the page (package view/web)
// have in common: where their frames come from, the history of the last minutes, the columns
// and their order, and how figures and the names of containers are written. It draws nothing,
// and computes no figure itself: [api.Frame.After] does. Package agent does not use it.
package view

import (
	"context"
	"iter"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/record"
)

// Every is the time between two frames of a live view.
const Every = 2 * time.Second

// Source is where the frames of a view come from: an agent, or a recording ([record.Reader]).
type Source interface {
	// Frames yields the frames that were recorded from one time to another, inclusive, in their
	// order, but those that follow another by less than every. A zero time is no bound. It yields
	// none where nothing was recorded or may be read.
	Frames(ctx context.Context, from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error]
	// Span returns the times of the first and the last recorded frame, zero without any.
	Span() (first, last time.Time)
}

// Live is the Source of an agent that runs, such as an [Agent].
type Live interface {
	Source
	// Next returns the newest frame.
	Next(ctx context.Context) (api.Frame, error)
}

// Agent is an agent that runs, with what it has recorded.
type Agent struct {
	*record.Reader // the agent's own recording, possibly still written; nil: none, or none that may be read
	Client         *api.Client
}

// Next asks the agent at once.
func (a *Agent) Next(ctx context.Context) (api.Frame, error) { return a.Client.Frame(ctx) }
