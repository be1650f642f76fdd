package tui

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

// View implements [tea.Model].
func (m *model) View() tea.View {
	var lines []string
	switch m.page {
	case pageTable:
		lines = m.table()
	case pageOne:
		lines = m.scrolled(m.one(), "Esc back  ↑↓ scroll  p pause  ←→ [] {} time  n now  ? help  q quit")
	case pageHelp:
		lines = m.scrolled(m.help(), "any other key: back")
	}
	for i, l := range lines {
		lines[i] = m.look.cut(l, m.width)
	}
	v := tea.NewView(strings.Join(lines[:min(len(lines), m.height)], "\n"))
	v.AltScreen = true
	if !m.o.ASCII {
		v.MouseMode = tea.MouseModeCellMotion
	}
	v.DisableBracketedPasteMode = m.o.ASCII
	return v
}

// tableTop is the line of the first row of the table. The title, a summary and the heads are
// above it.
const tableTop = 3

// below is how many lines are below the table: two about the container under the cursor, and the
// keys.
func (m *model) below() int {
	if m.height < 12 {
		return 1
	}
	return 3
}

// room is how many rows the table has on the screen.
func (m *model) room() int { return max(1, m.height-tableTop-m.below()) }

// title is the first line: what is looked at, and of when it is.
func (m *model) title() string {
	o, ok := m.shown()
	left := "fairlead top  " + view.Show(m.o.Title)
	if ok {
		left += "  " + m.clock(o.Taken)
	}
	style, right := m.look.bar, ""
	now := m.o.Now()
	switch {
	case m.loading:
		right = "reading the recording…"
	case m.live == nil && m.playing:
		right = "RECORDING, plays"
	case m.live == nil:
		right = "RECORDING"
	case m.err != nil:
		style = style.Inherit(m.look.bad)
		right = "NO ANSWER for " + view.Age(m.answered, now)
	case !m.at.IsZero() && now.Sub(m.at) < 2*m.o.Every:
		right = "PAUSED"
	case !m.at.IsZero():
		right = "PAUSED, " + view.Age(m.at, now) + " ago"
	default:
		right = fmt.Sprintf("every %v", m.o.Every)
	}
	return style.Render(m.look.line(left, right, m.width))
}

// clock formats a moment, with the day where that is not today's.
func (m *model) clock(t time.Time) string {
	now := m.o.Now()
	t = t.In(now.Location())
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format(time.TimeOnly)
	}
	return t.Format(time.DateTime)
}

// summary is the second line: how many containers are slowed, and the worst of it in words.
func (m *model) summary() string {
	if m.err != nil {
		return m.look.bad.Render(m.look.cut(m.look.text(view.ShowText(api.Text(m.err))), m.width))
	}
	o, ok := m.shown()
	if !ok {
		return "The first figures need two readings…"
	}
	slowed := 0
	for _, r := range o.Rows {
		if r.Slowed >= 0.005 {
			slowed++
		}
	}
	if slowed == 0 {
		return m.look.line(fmt.Sprintf("%d containers; their neighbours slow none of them", len(o.Rows)), m.arranged(), m.width)
	}
	worst := o.Rows[0]
	text := fmt.Sprintf("%d of %d containers slowed", slowed, len(o.Rows))
	if len(worst.By) > 0 {
		text += fmt.Sprintf("; %s %s by %s", view.Show(worst.Name), view.Percent(worst.Slowed), view.Blame(worst.By))
	}
	return m.look.slowed(worst.Slowed).Render(m.look.line(text, m.arranged(), m.width))
}

// arranged says what the table leaves out, or is sorted by, unless it is as at the start.
func (m *model) arranged() string {
	var parts []string
	if m.order.Filter != "" {
		parts = append(parts, "only "+view.ShowText(m.order.Filter))
	}
	if m.order.Sort != view.BySlowed || m.order.Reverse {
		for _, c := range view.Columns() {
			if c.Key == m.order.Sort {
				text := "by " + c.Head
				if m.order.Reverse {
					text += ", reversed"
				}
				parts = append(parts, text)
			}
		}
	}
	return strings.Join(parts, ", ")
}

// placed is a column on the screen.
type placed struct {
	view.Column
	x, width int
}

// Widths of the columns, and which are left out first where there is no room. Those without a
// width share what is left.
var (
	widths  = map[string]int{view.BySlowed: 6, "cpu": 5, "packets": 5, "out": 11, "in": 11, "added": 6, "iops": 9}
	leaves  = []string{"force", "in", "iops", "added", "out", "packets", "cpu", view.ByWhom}
	leasts  = map[string]int{view.ByName: 14, view.ByWhom: 15, "force": 8}
	weights = map[string]int{view.ByName: 4, view.ByWhom: 4, "force": 3}
)

// columns places the columns for which there is room.
func (m *model) columns() []placed {
	gap := 1
	if m.width >= 100 {
		gap = 2
	}
	list := view.Columns()
	var left int
	for drop := 0; ; drop++ {
		kept := list[:0:0]
		left = m.width + gap
		for _, c := range list {
			if !slices.Contains(leaves[:drop], c.Key) {
				kept = append(kept, c)
				left -= max(widths[c.Key], leasts[c.Key]) + gap
			}
		}
		if left >= 0 || drop == len(leaves) {
			list = kept
			break
		}
	}
	total := 0
	for _, c := range list {
		total += weights[c.Key]
	}
	left = max(left, 0)
	var out []placed
	x := 0
	for _, c := range list {
		p := placed{c, x, widths[c.Key]}
		if p.width == 0 {
			p.width = leasts[c.Key] + left*weights[c.Key]/total
		}
		out = append(out, p)
		x += p.width + gap
	}
	return out
}

// table draws the table of containers.
func (m *model) table() []string {
	columns := m.columns()
	lines := []string{m.title(), m.summary(), m.heads(columns)}
	end := min(m.offset+m.room(), len(m.rows))
	for n := m.offset; n < end; n++ {
		lines = append(lines, m.line(columns, m.rows[n], n == m.cursor))
	}
	lines = append(lines, make([]string, m.offset+m.room()-end)...)
	if m.below() > 1 {
		lines = append(lines, m.about(columns)...)
	}
	return append(lines, m.keys("Enter open  s sort  / filter  t tree  p pause  ←→ time  ? help  q quit"))
}

// keys is the last line: the filter that is typed, what the last key could not do, or the keys.
func (m *model) keys(text string) string {
	switch {
	case m.typing:
		return m.look.head.Render(m.look.text("Only names with: "+m.order.Filter)+"_") + m.look.text("   Enter: keep, Esc: all")
	case m.note != "":
		return m.look.warn.Render(m.look.text(m.note))
	}
	return m.look.dim.Render(m.look.text(text))
}

func (m *model) heads(columns []placed) string {
	var out strings.Builder
	for i, c := range columns {
		if i > 0 {
			out.WriteString(m.look.bar.Render(strings.Repeat(" ", c.x-columns[i-1].x-columns[i-1].width)))
		}
		style := m.look.bar
		if c.Key == m.order.Sort {
			style = m.look.head.Underline(true)
		}
		out.WriteString(style.Render(m.look.cell(c.Head, c.width, !c.Text)))
	}
	last := columns[len(columns)-1]
	return out.String() + m.look.bar.Render(strings.Repeat(" ", max(0, m.width-last.x-last.width)))
}

// line draws a row.
func (m *model) line(columns []placed, r view.Row, cursor bool) string {
	var out strings.Builder
	for i, c := range columns {
		if i > 0 {
			out.WriteString(strings.Repeat(" ", c.x-columns[i-1].x-columns[i-1].width))
		}
		cell := m.look.cell(c.Cell(r), c.width, !c.Text)
		style := lipgloss.NewStyle()
		switch {
		case cursor:
		case c.Key == view.BySlowed, c.Key == view.ByWhom, c.Key == view.ByName:
			style = m.look.slowed(r.Slowed)
		}
		if r.Members > 0 && !cursor {
			style = style.Bold(true)
		}
		out.WriteString(style.Render(cell))
	}
	if cursor {
		return m.look.bar.Render(m.look.cell(out.String(), m.width, false))
	}
	return out.String()
}

// about describes the container under the cursor in two lines: its whole name and who slows it,
// and the columns for which the table has no room.
func (m *model) about(columns []placed) []string {
	if len(m.rows) == 0 {
		return []string{"", ""}
	}
	r := m.rows[m.cursor]
	one := strings.TrimSpace(r.Label())
	if r.Members == 0 {
		one = view.Show(r.Name)
	}
	if len(r.By) > 0 {
		one += "  slowed " + view.Percent(r.Slowed) + " by " + view.Reasons(r.By)
	}
	var rest []string
	for _, c := range view.Columns() {
		if !slices.ContainsFunc(columns, func(p placed) bool { return p.Key == c.Key }) {
			rest = append(rest, c.Head+" "+c.Cell(r))
		}
	}
	return []string{m.look.text(one), m.look.dim.Render(m.look.text(strings.Join(rest, "   ")))}
}

// scrolled draws the part of a page that is in view, between the title and the keys.
func (m *model) scrolled(page []string, keys string) []string {
	room := max(1, m.height-2)
	m.scroll = max(0, min(m.scroll, len(page)-room))
	part := page[m.scroll:min(len(page), m.scroll+room)]
	lines := append([]string{m.title()}, part...)
	lines = append(lines, make([]string, max(0, m.height-1-len(lines)))...)
	if more := len(page) - m.scroll - len(part); more > 0 {
		keys = fmt.Sprintf("%d more lines  ", more) + keys
	}
	return append(lines, m.keys(keys))
}

// one draws the page of one container.
func (m *model) one() []string {
	row, there := m.row()
	o, _ := m.shown()
	h := m.history()
	name := m.look.head.Render(m.look.text(view.Show(row.Name)))
	var lines []string
	switch {
	case !there:
		lines = append(lines, name+m.look.text("  was not seen at this moment; it has ended, or not yet begun"))
	case len(row.By) == 0:
		lines = append(lines, name+m.look.text("  not slowed by its neighbours"))
	default:
		text := "  slowed " + view.Percent(row.Slowed) + " by " + view.Reasons(row.By)
		lines = append(lines, name+m.look.slowed(row.Slowed).Render(m.look.text(text)))
	}
	lines = append(lines, m.plots(h, row, o.Taken)...)

	by, of := h.Blame(o.Taken, view.Span)
	lines = append(lines, m.shares("Who slows it", by[m.id])...)
	lines = append(lines, m.shares("Whom it slows", of[m.id])...)
	if f := m.known.frame; f != nil {
		lines = append(lines, m.actions(view.Actions(*f, m.id), o.Taken)...)
	}
	return append(lines, m.about1(o.Taken)...)
}

// plots draws each figure over the last minutes.
func (m *model) plots(h *view.History, row api.OverviewRow, to time.Time) []string {
	const head, now, high = 8, 12, 9
	n := max(10, min(m.width-head-now-high-3, 100))
	part := view.Span / time.Duration(n)
	lines := []string{"", m.look.head.Render(m.look.cell("", head, false) + " " + m.look.cell("now", now, true) + " " +
		m.look.cell(fmt.Sprintf("%d minutes, %d s each", int(view.Span.Minutes()), int(part.Seconds())), n, false) + " " + m.look.cell("most", high, true))}
	for _, c := range view.Columns() {
		if c.Figure == nil {
			continue
		}
		values := h.Series(row.Container, c.Figure, to, view.Span, n)
		most, text := 0.0, "-"
		for _, v := range values {
			if !math.IsNaN(v) {
				most = max(most, v)
				text = c.Plot(most)
			}
		}
		plot := m.look.spark(values, most)
		style := m.look.good
		if c.Key == view.BySlowed {
			plot = m.look.spark(values, max(most, slowedBad)) // a few percent are not a mountain
			style = m.look.slowed(most)
		}
		head1, _, _ := strings.Cut(c.Head, "/")
		lines = append(lines, m.look.cell(head1, head, false)+" "+m.look.cell(c.Cell(view.Row{OverviewRow: row}), now, true)+" "+
			style.Render(plot)+" "+m.look.cell(text, high, true))
	}
	return lines
}

// shares draws what neighbours have cost each other.
func (m *model) shares(head string, list []view.Share) []string {
	if len(list) == 0 {
		return nil
	}
	const most = 8
	lines := []string{"", m.look.head.Render(m.look.cell(head, 40, false) + " " + m.look.cell("now", 7, true) + m.look.cell("10 minutes", 12, true))}
	for _, s := range list[:min(len(list), most)] {
		text := view.Neighbour(s.Other, s.Name, s.Cause) + ": " + view.Show(s.Cause)
		lines = append(lines, "  "+m.look.cell(text, 38, false)+" "+m.look.cell(view.Percent(s.Now), 7, true)+m.look.cell(view.Percent(s.Mean), 12, true))
	}
	if more := len(list) - most; more > 0 {
		lines = append(lines, fmt.Sprintf("  and %d more", more))
	}
	return lines
}

// actions draws what fairlead does for the container, and since when.
func (m *model) actions(list []view.Action, now time.Time) []string {
	if len(list) == 0 {
		return nil
	}
	lines := []string{"", m.look.head.Render("Actions, the latest first")}
	for _, a := range list[:min(len(list), 20)] {
		lines = append(lines, m.look.wrap("  "+m.look.cell(view.Age(a.Since, now), 7, true)+"  "+a.Text, m.width)...)
	}
	return lines
}

// about1 is the policy of the container, its state, and what was changed for it.
func (m *model) about1(now time.Time) []string {
	lines := []string{""}
	k := m.known
	switch {
	case k.id == 0:
		return append(lines, m.look.text("…"))
	case k.err != nil:
		return append(lines, m.look.wrap(view.ShowText(api.Text(k.err)), m.width)...)
	case !k.changes && k.frame == nil:
		return append(lines, "Policy and changes of this moment were not recorded.")
	}
	x := k.explain
	if !k.changes {
		i := slices.IndexFunc(k.frame.Containers, func(c api.Container) bool { return c.ID == m.id })
		if i < 0 {
			return lines
		}
		x.Container = k.frame.Containers[i]
	} else {
		now = m.o.Now()
	}
	for _, line := range strings.Split(strings.TrimRight(m.o.Text(x, k.changes, now), "\n"), "\n") {
		lines = append(lines, m.look.wrap(ansi.Strip(line), m.width)...)
	}
	return lines
}
