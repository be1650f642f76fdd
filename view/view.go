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
)

// Every is the time between two frames of a live view.
const Every = 2 * time.Second

// Source is where the frames of a view come from: an agent, or a recording.
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

// Recording is a recording of frames, such as a *record.Reader.
type Recording interface {
	Span() (first, last time.Time)
	Frames(from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error]
}

// Agent is an agent that runs, with what it has recorded.
type Agent struct {
	Recorded // the agent's own, possibly still written
	Client   *api.Client
}

// Next asks the agent at once.
func (a *Agent) Next(ctx context.Context) (api.Frame, error) { return a.Client.Frame(ctx) }

// Recorded is the Source of a recording; nil: none, or none that may be read.
type Recorded struct{ Recording }

// Span implements [Source].
func (r Recorded) Span() (first, last time.Time) {
	if r.Recording != nil {
		first, last = r.Recording.Span()
	}
	return first, last
}

// Frames implements [Source]. It ends with the error of ctx when that has ended.
func (r Recorded) Frames(ctx context.Context, from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error] {
	return func(yield func(api.Frame, error) bool) {
		if r.Recording == nil {
			return
		}
		for f, err := range r.Recording.Frames(from, to, every) {
			if e := ctx.Err(); e != nil {
				yield(api.Frame{}, e)
				return
			}
			if !yield(f, err) {
				return
			}
		}
	}
}
