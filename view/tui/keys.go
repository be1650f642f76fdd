package tui

import (
	"slices"
	"strings"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"

	"github.com/fairlead-project/fairlead/view"
)

// key acts on a key.
func (m *model) key(k tea.KeyPressMsg) tea.Cmd {
	name := k.String()
	// In the help these move, and do not leave it.
	scrolls := slices.Contains([]string{"up", "down", "k", "j", "pgup", "pgdown", "home", "end"}, name)
	switch {
	case name == "ctrl+c":
		return tea.Quit
	case name == "ctrl+z":
		return tea.Suspend
	case m.typing:
		m.typeFilter(name, k.Text)
		return nil
	case m.page == pageHelp && !scrolls:
		m.page, m.scroll = m.before, 0
		return nil
	}
	switch name {
	case "q", "f10":
		return tea.Quit
	case "?", "h", "f1":
		m.page, m.before, m.scroll = pageHelp, m.page, 0
	case "p", "space":
		return m.pause()
	case "n":
		return m.now()
	case "left":
		return m.step(-1)
	case "right":
		return m.step(1)
	case "[":
		return m.jump(-time.Minute)
	case "]":
		return m.jump(time.Minute)
	case "{":
		return m.jump(-10 * time.Minute)
	case "}":
		return m.jump(10 * time.Minute)
	case "w":
		if !m.loading {
			return m.load(m.moment(), true)
		}
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "pgup", "ctrl+b":
		m.move(-m.room())
	case "pgdown", "ctrl+f":
		m.move(m.room())
	case "home", "g":
		m.move(-1 << 20)
	case "end", "G":
		m.move(1 << 20)
	case "enter":
		if m.page == pageTable {
			return m.open()
		}
		m.page = pageTable
	case "esc", "backspace":
		if m.page == pageTable {
			m.order.Filter = ""
		}
		m.page = pageTable
	default:
		if m.page == pageTable {
			m.arrange(name)
		}
	}
	return nil
}

// arrange acts on the keys that change what the table shows.
func (m *model) arrange(name string) {
	switch name {
	case "/":
		m.typing = true
	case "t":
		m.order.Tree = !m.order.Tree
	case "r":
		m.order.Reverse = !m.order.Reverse
	case "s", ">":
		m.sortBeside(1)
	case "S", "<":
		m.sortBeside(-1)
	}
}

// sortBeside sorts by a column that is n places from the one by which the table is sorted.
func (m *model) sortBeside(n int) {
	columns := view.Columns()
	i := slices.IndexFunc(columns, func(c view.Column) bool { return c.Key == m.order.Sort })
	m.sortBy(columns[(i+n+len(columns))%len(columns)].Key)
}

func (m *model) sortBy(key string) {
	m.order.Sort, m.order.Reverse, m.follow, m.cursor = key, false, false, 0
}

// typeFilter takes a key of the filter.
func (m *model) typeFilter(name, text string) {
	switch name {
	case "enter":
		m.typing = false
	case "esc":
		m.typing, m.order.Filter = false, ""
	case "backspace":
		if r := []rune(m.order.Filter); len(r) > 0 {
			m.order.Filter = string(r[:len(r)-1])
		}
	case "ctrl+u":
		m.order.Filter = ""
	default:
		m.order.Filter += typed(text)
	}
	m.follow, m.cursor = false, 0
}

// typed is what of a text may stand in a line.
func typed(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, s)
}

// move moves the cursor, or the lines of a page.
func (m *model) move(n int) {
	if m.page != pageTable {
		m.scroll = max(0, m.scroll+n) // View knows how many lines there are
		return
	}
	m.cursor = max(0, min(m.cursor+n, len(m.rows)-1))
	m.follow = m.cursor > 0
	if len(m.rows) > 0 {
		m.selected = keyOf(m.rows[m.cursor])
	}
}

// open opens the container under the cursor, or folds the pod.
func (m *model) open() tea.Cmd {
	if len(m.rows) == 0 {
		return nil
	}
	r := m.rows[m.cursor]
	if r.Members > 0 {
		m.folded[keyOf(r)] = !m.folded[keyOf(r)]
		m.follow = true
		return nil
	}
	m.page, m.scroll, m.id, m.name, m.known = pageOne, 0, r.Container, r.Name, explainedMsg{}
	return m.explain(m.id)
}

// click acts on a click of the left button.
func (m *model) click(x, y int) tea.Cmd {
	switch i := y - tableTop + m.offset; {
	case m.page == pageHelp:
		m.page, m.scroll = m.before, 0
	case m.page == pageOne:
		if y == 0 {
			m.page = pageTable
		}
	case y == tableTop-1:
		for _, c := range m.columns() {
			if x >= c.x && x < c.x+c.width {
				if c.Key == m.order.Sort {
					m.order.Reverse = !m.order.Reverse
				} else {
					m.sortBy(c.Key)
				}
			}
		}
	case y >= tableTop && y < tableTop+m.room() && i < len(m.rows):
		if i == m.cursor {
			return m.open()
		}
		m.move(i - m.cursor)
	}
	return nil
}

// help draws the keys and what the columns mean.
func (m *model) help() []string {
	lines := []string{m.look.head.Render("Keys")}
	for _, k := range [][2]string{
		{"↑ ↓ PgUp PgDn", "move; Home, End: to the first, the last"},
		{"Enter", "open the container: ten minutes, blame, policy, changes; fold a pod"},
		{"Esc", "back to the table; there: show all containers again"},
		{"s S", "sort by the next column, the one before; r reverses"},
		{"/", "show only containers with a text in their name, or in who slows them"},
		{"t", "containers below their pods, or not"},
		{"p Space", "pause, and go on; in a recording: play, and stop"},
		{"← →", "one reading back, one on, where the past is known"},
		{"[ ] { }", "one minute back, on; ten minutes back, on"},
		{"w", "to the worst moment of the hour before"},
		{"n", "to the newest moment"},
		{"? q", "this help; quit"},
	} {
		lines = append(lines, m.look.cell("  "+k[0], 18, false)+m.look.text(k[1]))
	}
	if !m.o.ASCII {
		lines = append(lines, m.look.cell("  mouse", 18, false)+"click a row twice to open it, a head to sort by it; with Shift, the terminal selects text")
	}
	lines = append(lines, "", m.look.head.Render("Columns"))
	for _, c := range view.Columns() {
		head := c.Head
		for _, l := range m.look.wrap(c.Help, max(m.width-14, 20)) {
			lines = append(lines, m.look.cell("  "+head, 14, false)+l)
			head = ""
		}
	}
	return lines
}
