package tui

import (
	"cmp"
	"context"
	"slices"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

// page is what the screen shows.
type page int

const (
	pageTable page = iota
	pageOne
	pageHelp
)

// rowKey says which row is meant, across refreshes: a container, or a pod.
type rowKey struct {
	id             api.ID
	namespace, pod string
}

func keyOf(r view.Row) rowKey {
	if r.Members > 0 {
		return rowKey{namespace: r.Namespace, pod: r.Pod}
	}
	return rowKey{id: r.Container}
}

// model is the state of the view. Update changes it in place.
type model struct {
	ctx           context.Context
	o             Options
	look          look
	width, height int

	agent view.Live     // the source, if it is an agent
	live  *view.History // of a live source, since Run, and what was recorded in the minutes before
	past  *view.History // what was loaded around a moment; nil: nothing
	// at is the moment that is shown; zero: the newest of a live source.
	at          time.Time
	held        *api.Frame // at which a live view was paused
	first, last time.Time  // of the recording, as of the last load
	loading     bool
	playing     bool
	turn        int
	err         error     // of the last question to the agent
	answered    time.Time // when the agent last answered
	note        string    // what the last key could not do; until the next key

	page   page
	before page // under the help
	order  view.Order
	folded map[rowKey]bool
	typing bool // the filter is being typed

	rows     []view.Row
	selected rowKey
	follow   bool // the cursor stays with selected, not at its place
	cursor   int  // index into rows
	offset   int  // first row on the screen

	id     api.ID // of the page of one container
	name   string // its name, when it was last seen
	known  explainedMsg
	scroll int // first line of the page, or of the help
}

func newModel(ctx context.Context, o Options) *model {
	m := &model{ctx: ctx, o: o, look: newLook(o), width: 80, height: 24, order: o.Order, folded: make(map[rowKey]bool), at: o.At, answered: o.Now()}
	m.order.Sort = cmp.Or(m.order.Sort, view.BySlowed)
	m.agent, _ = o.Source.(view.Live)
	if m.agent != nil {
		m.live = &view.History{Keep: view.Span + time.Minute}
		for _, f := range o.First {
			m.live.Add(f)
		}
	}
	m.refresh()
	return m
}

// Init asks for the first frames.
func (m *model) Init() tea.Cmd {
	if m.live == nil {
		return m.load(m.at, false)
	}
	now := m.o.Now()
	earlier := func() tea.Msg { // what was recorded before; what cannot be read is missing in the plots
		h, _ := view.Load(m.ctx, m.o.Source, now.Add(-view.Span), now)
		return earlierMsg{h}
	}
	// The first difference is shown after half the time, so that somebody who has just come
	// need not wait.
	cmds := []tea.Cmd{m.next(m.o.Every / 2), earlier}
	if !m.at.IsZero() {
		cmds = append(cmds, m.load(m.at, false))
	}
	return tea.Batch(cmds...)
}

// Update implements [tea.Model].
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	var cmd tea.Cmd
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		m.note = ""
		cmd = m.key(msg)
	case tea.PasteMsg:
		if m.typing {
			m.order.Filter += typed(msg.Content)
		}
	case tea.MouseWheelMsg:
		switch msg.Button {
		case tea.MouseWheelUp:
			m.move(-3)
		case tea.MouseWheelDown:
			m.move(3)
		}
	case tea.MouseClickMsg:
		if msg.Button == tea.MouseLeft {
			cmd = m.click(msg.X, msg.Y)
		}
	case frameMsg:
		cmd = m.frame(msg)
	case loadedMsg:
		cmd = m.loaded(msg)
	case earlierMsg:
		m.live.Before(msg.history)
	case explainedMsg:
		if msg.id == m.id && msg.at.Equal(m.at) {
			m.known = msg
		}
	case playMsg:
		if m.playing && int(msg) == m.turn {
			cmd = tea.Batch(m.step(1), m.play())
		}
	}
	m.refresh()
	return m, cmd
}

// frame takes an answer of the agent, and asks for the next.
func (m *model) frame(msg frameMsg) tea.Cmd {
	m.err = msg.err
	if msg.err != nil {
		return m.next(m.o.Every)
	}
	m.answered = m.o.Now()
	m.live.Add(msg.frame)
	cmds := []tea.Cmd{m.next(m.o.Every)}
	if m.page == pageOne && m.at.IsZero() {
		cmds = append(cmds, m.explain(m.id))
	}
	return tea.Batch(cmds...)
}

// loaded takes a part of the past.
func (m *model) loaded(msg loadedMsg) tea.Cmd {
	m.loading = false
	m.first, m.last = msg.first, msg.last
	o, ok := api.Overview{}, false
	if msg.history != nil {
		if msg.worst {
			o, ok = msg.history.Worst()
		} else if o, ok = msg.history.At(msg.target); !ok {
			o, ok = msg.history.Step(time.Time{}, 1)
		}
	}
	switch {
	case ok:
		if m.past = msg.history; m.past.Cut {
			m.note = view.ErrRoom.Error()
		}
		return m.show(o.Taken)
	case msg.worst && msg.history != nil:
		m.note = "no container was slowed in the hour before"
		return nil
	case msg.err != nil:
		m.note = view.ShowText(api.Text(msg.err))
	case m.live != nil:
		m.note = "nothing was recorded then, or it cannot be read here"
	default:
		m.note = "there are not two readings in the recording"
	}
	if m.live != nil {
		if _, ok := m.live.At(m.at); !ok {
			m.at = time.Time{}
		}
	}
	return nil
}

// history is the one that has the moment shown.
func (m *model) history() *view.History {
	if m.live != nil {
		first, _ := m.live.Bounds()
		if m.at.IsZero() || m.past == nil || !m.at.Before(first) {
			return m.live
		}
	}
	if m.past != nil {
		return m.past
	}
	return new(view.History)
}

// shown is the overview of the moment shown.
func (m *model) shown() (api.Overview, bool) {
	h, at := m.history(), m.at
	if at.IsZero() {
		_, at = h.Bounds()
	}
	return h.At(at)
}

// show moves to the moment of an overview.
func (m *model) show(at time.Time) tea.Cmd {
	m.at = at
	m.known = explainedMsg{}
	if m.page == pageOne {
		return m.explain(m.id)
	}
	return nil
}

// now moves to the newest moment.
func (m *model) now() tea.Cmd {
	m.playing = false
	if m.live == nil {
		return m.load(time.Time{}, false)
	}
	return m.show(time.Time{})
}

// moment is the time shown.
func (m *model) moment() time.Time {
	if o, ok := m.shown(); ok {
		return o.Taken
	}
	return m.o.Now()
}

// step moves n readings on, or back.
func (m *model) step(n int) tea.Cmd {
	h := m.history()
	if o, ok := h.Step(m.moment(), n); ok {
		return m.arrive(h, o)
	}
	first, last := h.Bounds()
	switch {
	case m.loading || first.IsZero():
		return nil
	case n > 0 && h == m.live:
		return m.now()
	case n > 0 && !last.Before(m.last) && m.live == nil:
		m.playing = false
		m.note = "that is the end of the recording"
		return nil
	case n > 0:
		return m.jump(time.Second)
	}
	return m.jump(-time.Second)
}

// jump moves by a time.
func (m *model) jump(d time.Duration) tea.Cmd {
	h, target := m.history(), m.moment().Add(d)
	first, last := h.Bounds()
	switch {
	case m.loading || first.IsZero():
		return nil
	case !target.Before(first) && (!target.After(last) || h == m.live):
		o, _ := h.At(target)
		return m.arrive(h, o)
	case h == m.past && !m.first.IsZero() && target.Before(m.first) && !m.moment().After(first):
		m.note = "that is the start of the recording"
		return nil
	case h == m.past && m.live != nil:
		if o, ok := m.live.At(target); ok {
			return m.arrive(m.live, o)
		}
	}
	return m.load(target, false)
}

// arrive shows an overview of a history: the newest of a live one for as long as it is that. If
// the plots lack a part that may be recorded, it is loaded.
func (m *model) arrive(h *view.History, o api.Overview) tea.Cmd {
	first, last := h.Bounds()
	if h == m.live && !o.Taken.Before(last) {
		return m.now()
	}
	cmd := m.show(o.Taken)
	if h == m.past && o.Taken.Add(-view.Span).Before(first) && first.Sub(m.first) > time.Minute && !m.loading {
		return tea.Batch(cmd, m.load(o.Taken, false))
	}
	return cmd
}

// pause stops at the moment shown, or goes on; a recording plays, or stops.
func (m *model) pause() tea.Cmd {
	switch {
	case m.live == nil:
		m.playing = !m.playing
		m.turn++
		if m.playing {
			return m.play()
		}
		return nil
	case !m.at.IsZero():
		return m.now()
	}
	if o, ok := m.shown(); ok {
		m.at, m.held = o.Taken, m.live.Last()
	}
	return nil
}

// refresh makes the rows of the moment shown, and keeps the cursor on one of them.
func (m *model) refresh() {
	o, _ := m.shown()
	m.rows = slices.DeleteFunc(view.Rows(o, m.order), func(r view.Row) bool {
		return r.Below && m.order.Filter == "" && m.folded[rowKey{namespace: r.Namespace, pod: r.Pod}]
	})
	if m.follow {
		if i := slices.IndexFunc(m.rows, func(r view.Row) bool { return keyOf(r) == m.selected }); i >= 0 {
			m.cursor = i
		}
	}
	m.cursor = max(0, min(m.cursor, len(m.rows)-1))
	if len(m.rows) > 0 {
		m.selected = keyOf(m.rows[m.cursor])
	}
	room := m.room()
	m.offset = max(0, min(m.offset, m.cursor, len(m.rows)-room))
	m.offset = max(m.offset, m.cursor-room+1)
}

// row returns the row of the container of pageOne.
func (m *model) row() (api.OverviewRow, bool) {
	o, _ := m.shown()
	i := slices.IndexFunc(o.Rows, func(r api.OverviewRow) bool { return r.Container == m.id })
	if i < 0 {
		return api.OverviewRow{Container: m.id, Name: m.name}, false
	}
	return o.Rows[i], true
}
