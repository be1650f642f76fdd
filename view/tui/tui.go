// Package tui is the view of fairlead top: a table of containers in a terminal that refreshes
// itself, and a page for one of them, of an agent that runs or of a recording. Package view
// decides what is shown, and in which words. The verb top calls Run; what is no terminal gets a
// plain table from that verb.
package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/colorprofile"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

// Options is what Run shows, and where.
type Options struct {
	Source view.Source
	Title  string        // of the host or the recording; it need not be safe to print
	First  []api.Frame   // of a live source, read already, in order
	Every  time.Duration // between two frames of a live source
	At     time.Time     // the moment to start with; zero: the newest
	Order  view.Order

	// Explain asks a live agent for all that is known of a container. Text writes that for
	// people, safe to print, as of a moment; changes says that x.Changes is known.
	Explain func(ctx context.Context, id api.ID) (api.Explanation, error)
	Text    func(x api.Explanation, changes bool, now time.Time) string

	In      io.Reader
	Out     io.Writer
	Environ []string
	Plain   bool // no colours
	ASCII   bool // nothing but ASCII, and no sequences that a VT100 does not know
	Now     func() time.Time
}

// Run shows o.Source until the user quits or ctx ends, and restores the terminal.
func Run(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	options := []tea.ProgramOption{tea.WithContext(ctx), tea.WithInput(o.In), tea.WithOutput(o.Out), tea.WithEnvironment(o.Environ), tea.WithFPS(10)}
	if o.Plain || o.ASCII {
		options = append(options, tea.WithColorProfile(colorprofile.ASCII))
	}
	_, err := tea.NewProgram(newModel(ctx, o), options...).Run()
	switch {
	case errors.Is(err, tea.ErrInterrupted), ctx.Err() != nil:
		return nil
	case err != nil:
		return fmt.Errorf("draw on the terminal: %w", err)
	}
	return nil
}

// The messages of the program, beside those of the terminal.
type (
	// frameMsg is the answer of a live agent.
	frameMsg struct {
		frame api.Frame
		err   error
	}
	// loadedMsg is a part of the past, and the times of the whole recording. target is the moment
	// that it was loaded for.
	loadedMsg struct {
		history     *view.History
		target      time.Time
		worst       bool // the worst moment before target is wanted
		first, last time.Time
		err         error
	}
	// earlierMsg is what was recorded in the minutes before a live view began.
	earlierMsg struct{ history *view.History }
	// explainedMsg is what is known of a container at a moment. frame is nil where none was
	// recorded.
	explainedMsg struct {
		id      api.ID
		at      time.Time
		frame   *api.Frame
		explain api.Explanation
		changes bool
		err     error
	}
	// playMsg is the next second of a recording that plays. Those of an earlier turn count no
	// longer.
	playMsg int
)

// next asks the agent for a frame after a time.
func (m *model) next(after time.Duration) tea.Cmd {
	return func() tea.Msg {
		select {
		case <-m.ctx.Done():
			return nil
		case <-time.After(after):
		}
		f, err := m.agent.Next(m.ctx)
		return frameMsg{f, err}
	}
}

// How much is loaded around a moment: enough for the plots, and for a few steps.
const (
	loadBefore = view.Span + 5*time.Minute
	loadAfter  = 5 * time.Minute
	loadWorst  = time.Hour
)

// load reads the past around a moment; zero: the newest of the recording.
func (m *model) load(target time.Time, worst bool) tea.Cmd {
	m.loading = true
	return func() tea.Msg {
		msg := loadedMsg{target: target, worst: worst}
		msg.first, msg.last = m.o.Source.Span()
		if msg.target.IsZero() || msg.target.After(msg.last) {
			msg.target = msg.last
		}
		if msg.target.Before(msg.first) {
			msg.target = msg.first
		}
		before := loadBefore
		if worst {
			before = loadWorst
		}
		if !msg.last.IsZero() {
			msg.history, msg.err = view.Load(m.ctx, m.o.Source, msg.target.Add(-before), msg.target.Add(loadAfter))
		}
		return msg
	}
}

// explain finds out all about a container: from the agent if the moment is now, else from what
// was recorded.
func (m *model) explain(id api.ID) tea.Cmd {
	at := m.at
	if at.IsZero() && m.o.Explain != nil {
		f := m.live.Last()
		return func() tea.Msg {
			x, err := m.o.Explain(m.ctx, id)
			return explainedMsg{id: id, frame: f, explain: x, changes: err == nil, err: err}
		}
	}
	held := m.held
	return func() tea.Msg {
		msg := explainedMsg{id: id, at: at}
		if held != nil && held.Taken.Equal(at) {
			msg.frame = held
			return msg
		}
		for f, err := range m.o.Source.Frames(m.ctx, at, at, 0) {
			if msg.err = err; err == nil {
				msg.frame = &f
			}
			break
		}
		return msg
	}
}

// play waits for the next second of a recording that plays.
func (m *model) play() tea.Cmd {
	turn := m.turn
	return tea.Tick(time.Second, func(time.Time) tea.Msg { return playMsg(turn) })
}
