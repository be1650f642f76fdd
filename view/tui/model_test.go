package tui

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/viewtest"
	"github.com/fairlead-project/fairlead/view"
)

// options are those of a view of a source, whose clock is always at one moment.
func options(s view.Source, now time.Time) Options {
	return Options{
		Source: s, Title: "host-1", Every: 2 * time.Second, Now: func() time.Time { return now },
		Text: func(x api.Explanation, changes bool, now time.Time) string {
			return fmt.Sprintf("policy of %s\nchanges known: %v", view.Show(x.Container.Name), changes)
		},
		Explain: func(_ context.Context, id api.ID) (api.Explanation, error) {
			return api.Explanation{Container: api.Container{ID: id, Name: "explained"}}, nil
		},
	}
}

// opened returns the view of a recording at its end, and everything loaded.
func opened(t *testing.T, r viewtest.Recording) *model {
	t.Helper()
	_, last := r.Span()
	m := newModel(t.Context(), options(r, last.Add(time.Minute)))
	obey(t, m, m.Init())
	return m
}

// watched returns the view of a live host that has shown so many frames.
func watched(t *testing.T, h viewtest.Host, frames int) (*model, *viewtest.Live) {
	t.Helper()
	s := &viewtest.Live{Host: h}
	o := options(s, h.Taken(frames))
	first, _ := s.Next(t.Context())
	o.First = []api.Frame{first}
	m := newModel(t.Context(), o)
	for range frames - 1 {
		f, err := s.Next(t.Context())
		m.Update(frameMsg{f, err}) // the command that waits for the next is not run
	}
	return m, s
}

// obey runs a command, and the commands that follow from it, except those that wait.
func obey(t *testing.T, m *model, cmd tea.Cmd) {
	t.Helper()
	if cmd == nil {
		return
	}
	switch msg := cmd().(type) {
	case tea.BatchMsg:
		for _, c := range msg {
			obey(t, m, c)
		}
	case nil:
	default:
		_, next := m.Update(msg)
		obey(t, m, next)
	}
}

// press presses keys, named as in tea.Key.String.
func press(t *testing.T, m *model, keys ...string) {
	t.Helper()
	special := map[string]rune{"enter": tea.KeyEnter, "esc": tea.KeyEscape, "left": tea.KeyLeft, "right": tea.KeyRight, "up": tea.KeyUp, "down": tea.KeyDown, "end": tea.KeyEnd, "backspace": tea.KeyBackspace, "pgdown": tea.KeyPgDown}
	for _, k := range keys {
		msg := tea.KeyPressMsg{Code: special[k]}
		if msg.Code == 0 {
			msg = tea.KeyPressMsg{Code: []rune(k)[0], Text: k}
		}
		_, cmd := m.Update(msg)
		obey(t, m, cmd)
	}
}

// screen is what the view shows, without styles. It fails the test if that does not fit.
func screen(t *testing.T, m *model) string {
	t.Helper()
	text := ansi.Strip(m.View().Content)
	lines := strings.Split(text, "\n")
	if len(lines) > m.height {
		t.Errorf("%d lines on a screen of %d", len(lines), m.height)
	}
	for _, l := range lines {
		if n := ansi.StringWidth(l); n > m.width {
			t.Errorf("a line of %d on a screen of %d: %s", n, m.width, l)
		}
	}
	return text
}

func wants(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is not on the screen:\n%s", p, text)
		}
	}
}

func lineOf(text, part string) int {
	for i, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(l, part) {
			return i
		}
	}
	return -1
}

func TestTable(t *testing.T) {
	m, _ := watched(t, viewtest.Host{Containers: 60, Every: 2 * time.Second}, 3)
	for _, size := range [][2]int{{80, 24}, {120, 40}, {40, 10}, {20, 5}, {300, 100}} {
		m.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		text := screen(t, m)
		if size[0] < 80 {
			continue
		}
		wants(t, text, "host-1", "SLOWED", "1 of 60 containers slowed; db-1 18 % by flood: packets +1", "every 2s", "q quit")
		if lineOf(text, "db-1") != tableTop {
			t.Errorf("%v: the victim is not the first:\n%s", size, text)
		}
		if shown := strings.Contains(strings.Split(text, "\n")[2], "IN FORCE"); shown != (size[0] > 80) {
			t.Errorf("%v: IN FORCE: %v\n%s", size, shown, text)
		}
		wants(t, text, "traffic") // in the lines about the container, where it has no column
	}
}

func TestSortFilterTree(t *testing.T) {
	m, _ := watched(t, viewtest.Host{Containers: 30, Every: 2 * time.Second}, 3)
	press(t, m, "s", "s") // by whom, then by CPU
	text := screen(t, m)
	wants(t, text, "by CPU")
	if lineOf(text, "db-1") != tableTop || lineOf(text, "web-") != tableTop+1 {
		t.Errorf("sorted by CPU:\n%s", text)
	}
	press(t, m, "r")
	wants(t, screen(t, m), "by CPU, reversed")
	press(t, m, "S", "S", "/", "c", "a", "r", "x", "backspace", "enter")
	if text = screen(t, m); lineOf(text, "shop/cart-0/c0") != tableTop || len(m.rows) != 2 {
		t.Errorf("filtered:\n%s", text)
	}
	press(t, m, "t")
	if text = screen(t, m); lineOf(text, "shop/cart-0 ") != tableTop || lineOf(text, "  c0") != tableTop+1 {
		t.Errorf("as a tree:\n%s", text)
	}
	press(t, m, "esc", "t")
	if len(m.rows) != 30 {
		t.Errorf("%d rows without the filter", len(m.rows))
	}
}

// The cursor stays with its container while that changes its place.
func TestCursor(t *testing.T) {
	m, s := watched(t, viewtest.Host{Containers: 30, Every: 2 * time.Second}, 3)
	press(t, m, "s", "s", "s", "s", "s", "s", "down", "down", "down") // by bandwidth, which changes its order
	id, place, moved := m.rows[m.cursor].Container, m.cursor, false
	for range 20 {
		f, err := s.Next(t.Context())
		m.Update(frameMsg{f, err})
		if got := m.rows[m.cursor].Container; got != id {
			t.Fatalf("the cursor is on %v, not %v", got, id)
		}
		moved = moved || m.cursor != place
		if m.cursor < m.offset || m.cursor >= m.offset+m.room() {
			t.Fatal("the cursor is not on the screen")
		}
	}
	if !moved {
		t.Error("no row has moved, so the test shows nothing")
	}
	press(t, m, "end")
	testkit.Same(t, "End: row", 29, m.cursor)
}

func TestMouse(t *testing.T) {
	m, _ := watched(t, viewtest.Host{Containers: 30, Every: 2 * time.Second}, 3)
	click := func(x, y int) {
		_, cmd := m.Update(tea.MouseClickMsg{X: x, Y: y, Button: tea.MouseLeft})
		obey(t, m, cmd)
	}
	for _, c := range m.columns() {
		if c.Key == "cpu" {
			click(c.x+1, tableTop-1)
		}
	}
	testkit.Same(t, "sorted by", "cpu", m.order.Sort)
	click(1, tableTop+2)
	if m.cursor != 2 || m.page != pageTable {
		t.Errorf("row %d, page %d", m.cursor, m.page)
	}
	m.Update(tea.MouseWheelMsg{Button: tea.MouseWheelDown})
	testkit.Same(t, "the wheel: row", 5, m.cursor)
	click(1, tableTop+5)
	if m.page != pageOne {
		t.Error("a second click does not open")
	}
	click(1, 0)
	if m.page != pageTable {
		t.Error("a click on the title does not lead back")
	}
	click(1, 1000)
}

func TestOne(t *testing.T) {
	m, _ := watched(t, viewtest.Host{Containers: 30, Every: 2 * time.Second}, 30)
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 60})
	press(t, m, "enter")
	text := screen(t, m)
	wants(t, text, "db-1  slowed 18 % by flood: packets 16 %", "10 minutes, 12 s each", "Who slows it", "flood: packets", "Actions", "fairlead.netcpu = isolate in place of auto", "policy of explained", "changes known: true")
	if strings.Count(text, "█") < 4 {
		t.Errorf("no plots:\n%s", text)
	}
	press(t, m, "esc", "/", "f", "l", "o", "o", "d", "enter", "down", "enter")
	wants(t, screen(t, m), "flood", "Whom it slows", "db-1: packets")
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 14})
	wants(t, screen(t, m), "more lines")
	press(t, m, "end")
	wants(t, screen(t, m), "changes known: true")
	press(t, m, "?")
	wants(t, screen(t, m), "Keys", "any other key: back")
	press(t, m, "x")
	if m.page != pageOne {
		t.Error("the help does not lead back")
	}
}

// An agent that goes away leaves what it said last, and the view says so; when it is back, all
// goes on.
func TestAgentAway(t *testing.T) {
	m, s := watched(t, viewtest.Host{Containers: 10, Every: 2 * time.Second}, 3)
	now := m.o.Now()
	m.o.Now = func() time.Time { return now.Add(12 * time.Second) }
	_, cmd := m.Update(frameMsg{api.Frame{}, fmt.Errorf("%w\x1b[2J", api.ErrNoAgent)})
	wants(t, screen(t, m), "NO ANSWER for 12 s", "no agent answers", "db-1", `\x1b[2J`)
	if cmd == nil {
		t.Error("the agent is not asked again")
	}
	f, err := s.Next(t.Context())
	m.Update(frameMsg{f, err})
	if text := screen(t, m); strings.Contains(text, "NO ANSWER") || !strings.Contains(text, "every 2s") {
		t.Errorf("the agent is back:\n%s", text)
	}
}

func TestPause(t *testing.T) {
	m, s := watched(t, viewtest.Host{Containers: 10, Every: 2 * time.Second}, 5)
	at := m.moment()
	press(t, m, "p")
	for range 3 {
		f, err := s.Next(t.Context())
		m.Update(frameMsg{f, err})
	}
	if !m.moment().Equal(at) {
		t.Error("it goes on while paused")
	}
	wants(t, screen(t, m), "PAUSED")
	press(t, m, "left")
	testkit.Same(t, "one step back", 2*time.Second, at.Sub(m.moment()))
	press(t, m, "p")
	testkit.Same(t, "it goes on at", 6*time.Second, m.moment().Sub(at))
	press(t, m, "left", "right") // the newest is live again
	if !m.at.IsZero() {
		t.Error("the newest reading is not live")
	}
	// There is no recording to go back to.
	press(t, m, "{")
	wants(t, screen(t, m), "nothing was recorded then")
	if !m.at.IsZero() {
		t.Errorf("it shows %v", m.at)
	}
}

// A recording of half an hour, with the flood in its last minutes, can be walked through.
func TestReplay(t *testing.T) {
	r := viewtest.Recording{Host: viewtest.Host{Containers: 6, Every: 5 * time.Second, Calm: 300}, Count: 361}
	m := opened(t, r)
	minute := func() float64 { return m.moment().Sub(viewtest.Start).Minutes() }
	if minute() != 30 {
		t.Fatalf("it begins at minute %v", minute())
	}
	wants(t, screen(t, m), "RECORDING", "db-1 18 % by flood: packets")
	for _, tt := range []struct {
		keys string
		want float64
	}{
		{"[", 29}, {"{", 19}, {"{", 9}, {"]", 10}, {"}", 20}, {"[[[[", 16}, {"{", 6}, {"{", 5. / 60}, {"}}}", 30}, {"n", 30},
	} {
		for _, k := range tt.keys {
			_, cmd := m.Update(tea.KeyPressMsg{Code: k, Text: string(k)})
			obey(t, m, cmd)
		}
		if got := minute(); got < tt.want-0.2 || got > tt.want+0.2 {
			t.Errorf("%s: minute %v, want %v", tt.keys, got, tt.want)
		}
	}
	press(t, m, "left", "left", "right")
	if got := 30*60 - minute()*60; got != 5 {
		t.Errorf("%v s before the end", got)
	}
	press(t, m, "{", "w") // at minute 20, nothing has happened yet
	if got := minute(); got < 19.9 || got > 20.1 {
		t.Errorf("the worst before minute 20 is at %v", got)
	}
	wants(t, screen(t, m), "no container was slowed")
	press(t, m, "n", "w")
	if got := minute(); got < 25 {
		t.Errorf("the worst is at %v", got)
	}
	press(t, m, "enter")
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 60})
	wants(t, screen(t, m), "db-1  slowed", "policy of db-1", "changes known: false")
	// Steps lead over the border of what is loaded.
	press(t, m, "esc", "{", "{")
	for range 200 {
		at := minute()
		press(t, m, "right")
		if got := minute() - at; got < 4.9/60 || got > 5.1/60 {
			t.Fatalf("a step from minute %v is one of %v", at, got)
		}
	}
}

// Nothing that a container is called, or that an agent says, reaches the terminal as it is, and no
// control character but those of the view itself.
func TestHostile(t *testing.T) {
	for _, ascii := range []bool{false, true} {
		m, _ := watched(t, viewtest.Host{Containers: 10, Every: 2 * time.Second}, 5)
		m.o.ASCII, m.look = ascii, newLook(Options{ASCII: ascii})
		m.o.Title = viewtest.Hostile
		m.o.Explain = func(context.Context, api.ID) (api.Explanation, error) {
			return api.Explanation{}, errors.New(viewtest.Hostile)
		}
		m.Update(tea.WindowSizeMsg{Width: 200, Height: 100})
		check := func() {
			t.Helper()
			content := m.View().Content
			for _, bad := range []string{"\x1b]", "\a", "\u009b", "\u202e", "\r", "\xff", "\x7f", "\x1b[31m\x1b]", "\x1b[2J"} {
				if strings.Contains(content, bad) {
					t.Errorf("%q is on the screen", bad)
				}
			}
			for _, r := range ansi.Strip(content) {
				if r != '\n' && !unicode.IsPrint(r) || ascii && r > 0x7f {
					t.Fatalf("%q is on the screen", r)
				}
			}
		}
		check()
		for i := range m.rows {
			m.cursor, m.follow = i, false
			press(t, m, "enter")
			check()
			press(t, m, "esc")
		}
		m.Update(tea.PasteMsg{Content: viewtest.Hostile})
		press(t, m, "/")
		m.Update(tea.PasteMsg{Content: "\x1b[31m"})
		m.Update(frameMsg{api.Frame{}, errors.New(viewtest.Hostile)})
		check()
	}
}

// counter counts what is written, and keeps the end of it.
type counter struct {
	mu   sync.Mutex
	n    int
	wait map[string]chan struct{}
	tail bytes.Buffer
}

func (c *counter) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += len(p)
	c.tail.Write(p)
	for text, ch := range c.wait {
		if strings.Contains(ansi.Strip(c.tail.String()), text) {
			close(ch)
			delete(c.wait, text)
			c.tail.Reset()
		}
	}
	return len(p), nil
}

// until returns a channel that is closed when a text has been written.
func (c *counter) until(text string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan struct{})
	c.wait[text] = ch
	return ch
}

func (c *counter) written() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// A line of 5 kB/s suffices for 60 containers whose figures all change: every refresh, which comes
// every 2 s, writes 10 kB at most. The first screen may take as long as that, too.
func TestSlowLine(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {120, 40}, {200, 60}} {
		for _, key := range []string{"", "enter"} {
			t.Run(fmt.Sprintf("%dx%d%s", size[0], size[1], key), func(t *testing.T) {
				h := viewtest.Host{Containers: 60, Every: 2 * time.Second}
				m, s := watched(t, h, 40)
				if key != "" {
					press(t, m, key)
				}
				out := &counter{wait: make(map[string]chan struct{})}
				in, keep := io.Pipe()
				defer keep.Close()
				p := tea.NewProgram(quiet{m}, tea.WithContext(t.Context()), tea.WithInput(in), tea.WithOutput(out), tea.WithEnvironment([]string{"TERM=xterm-256color"}),
					tea.WithWindowSize(size[0], size[1]), tea.WithoutSignals())
				drawn := out.until("quit")
				ended := make(chan error, 1)
				go func() { _, err := p.Run(); ended <- err }()
				await(t, drawn)
				first := out.written()
				const frames = 20
				for i := range frames {
					f, err := s.Next(t.Context())
					mark := strings.Repeat(string(rune('A'+i)), 9) // differs in each cell from the last
					drawn := out.until(mark)
					p.Send(frameMsg{f, err})
					p.Send(markMsg(mark))
					await(t, drawn)
				}
				each := (out.written() - first) / frames
				p.Quit()
				testkit.Check(t, <-ended)
				t.Logf("first screen %d bytes, each refresh %d", first, each)
				if first > 10_000 || each > 10_000 {
					t.Errorf("the first screen has %d bytes, each refresh %d: more than 10 kB", first, each)
				}
			})
		}
	}
}

// markMsg puts a mark on the last line, by which a test sees that a frame was drawn.
type markMsg string

// quiet is a model that does not ask for frames by itself.
type quiet struct{ *model }

func (q quiet) Init() tea.Cmd { return nil }

func (q quiet) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	if mark, ok := msg.(markMsg); ok {
		q.note = string(mark)
		return q, nil
	}
	q.model.Update(msg)
	return q, nil
}

func await(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(30 * time.Second):
		t.Fatal("it was not drawn")
	}
}
