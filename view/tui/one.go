package tui

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

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
