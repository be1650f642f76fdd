package tui

import (
	"github.com/fairlead-project/fairlead/view"
)

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
		for i, l := range m.look.wrap(c.Help, max(m.width-14, 20)) {
			head := ""
			if i == 0 {
				head = c.Head
			}
			lines = append(lines, m.look.cell("  "+head, 14, false)+l)
		}
	}
	return lines
}
