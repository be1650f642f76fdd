// Package columns prints tables from declared columns: the head, the cell for each row, and how the
// column gives way on a short line. It knows no wire type, and does not choose the rows; the verbs
// of fairlead use it.
package columns

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
)

// Line is the width of a line if no terminal reports one.
const Line = 80

// leastCut is the least width to which a cell is cut to fit a table.
const leastCut = 9

// Column declares a column of a table with rows of type R.
type Column[R any] struct {
	layout
	cell func(R) string
	off  bool
}

// layout is the place of a column in a line.
type layout struct {
	head  string
	right bool
	max   int  // most characters of a cell; 0: any number
	line  int  // the column gets what the others leave of a line of that width; 0: what it needs
	spare bool // it is left out where there is no room

	cells []string
	wide  int // width of the widest, before it is cut
}

// Text is a column of text that a container may have chosen: unprintable text is quoted, and empty
// text is "-".
func Text[R any](head string, cell func(R) string) Column[R] {
	return Plain(head, func(r R) string { return cli.Show(cell(r)) })
}

// Plain is a column of text that is safe to print.
func Plain[R any](head string, cell func(R) string) Column[R] {
	return Column[R]{layout: layout{head: head}, cell: cell}
}

// Number is a column of numbers, aligned to the right; an empty cell is "-".
func Number[R any](head string, cell func(R) string) Column[R] {
	c := Plain(head, func(r R) string { return cmp.Or(cell(r), "-") })
	c.right = true
	return c
}

// Cut limits the cells to most characters. On a terminal of known width they grow into free space,
// and shrink if there is none.
func (c Column[R]) Cut(most int) Column[R] {
	c.max = most
	return c
}

// Rest gives the column the rest of the line. line is the line's width if no terminal reports one.
func (c Column[R]) Rest(line int) Column[R] {
	c.line = line
	return c
}

// Spare lets the column be dropped in favour of the one with Rest. Of several, the last is dropped
// first, and the one with Rest at the end.
func (c Column[R]) Spare(is bool) Column[R] {
	c.spare = is
	return c
}

// When shows the column only if the condition holds.
func (c Column[R]) When(is bool) Column[R] {
	c.off = !is
	return c
}

// Print prints rows under the heads of the columns, with two spaces between columns. If no column
// has a head, it prints no line of heads.
func Print[R any](w io.Writer, rows []R, columns ...Column[R]) {
	s := make(sheet, 0, len(columns))
	heads := 0
	for _, c := range columns {
		if c.off {
			continue
		}
		k := c.layout
		heads += len(k.head)
		k.wide = utf8.RuneCountInString(k.head)
		for _, r := range rows {
			cell := c.cell(r)
			k.cells = append(k.cells, cell)
			k.wide = max(k.wide, utf8.RuneCountInString(cell))
		}
		s = append(s, k)
	}
	s = s.fit(w)
	if heads > 0 {
		s.write(w, func(c layout) string { return c.head })
	}
	for i := range rows {
		s.write(w, func(c layout) string { return c.cells[i] })
	}
}

// Below prints an empty line and a table, or nothing if there are no rows.
func Below[R any](w io.Writer, rows []R, columns ...Column[R]) {
	if len(rows) > 0 {
		fmt.Fprintln(w)
		Print(w, rows, columns...)
	}
}

// Note prints a sentence below a table. A terminal does not wrap its lines, and all but the first are
// indented.
func Note(w io.Writer, text string) {
	for i, line := range cli.Fold(text, cli.Across(w, Line)-2) {
		fmt.Fprintf(w, "%s%s\n", strings.Repeat("  ", min(i, 1)), line)
	}
}

func (c layout) width() int {
	if c.max > 0 {
		return min(c.wide, c.max)
	}
	return c.wide
}

// sheet is the shown columns of a table.
type sheet []layout

func (s sheet) write(w io.Writer, cell func(layout) string) {
	var line strings.Builder
	for _, c := range s {
		text := cli.Cut(cell(c), c.max)
		pad := strings.Repeat(" ", c.width()-utf8.RuneCountInString(text))
		if c.right {
			text, pad = pad+text, ""
		}
		line.WriteString(text + pad + "  ")
	}
	fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
}

// width returns the width of the columns, with the space after each.
func (s sheet) width() (sum int) {
	for _, c := range s {
		sum += c.width() + 2
	}
	return sum
}

// fit adapts the columns to the line.
func (s sheet) fit(w io.Writer) sheet {
	if i := slices.IndexFunc(s, func(c layout) bool { return c.line > 0 }); i >= 0 {
		s = s.leave(i, cli.Across(w, s[i].line))
	}
	if have := cli.Across(w, 0); have > 0 {
		s.grow(have)
		s.shrink(have, leastCut, func(c layout) bool { return c.max > 0 })
	}
	return s
}

// leave gives column i the rest of the line. To make room it drops spare columns, and column i
// itself if that is spare and would get too little. Then it also cuts other columns, those with a
// maximum first.
func (s sheet) leave(i, line int) sheet {
	rest := s[i]
	left := func() int { return line - s.width() + rest.width() + 2 }
	for n := len(s) - 1; n >= 0 && left() <= leastCut; n-- {
		if s[n].spare && s[n].line == 0 {
			s = slices.Delete(s, n, n+1)
		}
	}
	i = slices.IndexFunc(s, func(c layout) bool { return c.line > 0 })
	if left() > leastCut || !rest.spare {
		s[i].max = max(left(), leastCut)
		return s
	}
	s = slices.Delete(s, i, i+1)
	s.shrink(line, leastCut, func(c layout) bool { return c.max > 0 })
	s.shrink(line, 1, func(layout) bool { return true })
	return s
}

// grow gives free space to columns with a maximum.
func (s sheet) grow(line int) {
	free := line - s.width() + 2
	for i, c := range s {
		if room := min(c.wide-c.width(), free); c.max > 0 && room > 0 {
			s[i].max = c.width() + room
			free -= room
		}
	}
}

// shrink cuts the widest of some columns until all fit, none to less than a width.
func (s sheet) shrink(line, least int, some func(layout) bool) {
	for over := s.width() - 2 - line; over > 0; over-- {
		widest := -1
		for i, c := range s {
			if some(c) && c.width() > least && (widest < 0 || c.width() > s[widest].width()) {
				widest = i
			}
		}
		if widest < 0 {
			return
		}
		s[widest].max = s[widest].width() - 1
	}
}

// Ago formats the time from t to now, in one unit.
func Ago(t, now time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return view.Age(t, now) + " ago"
}

// Span formats a time in one unit.
func Span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h", d.Hours())
	}
	return fmt.Sprintf("%.1f days", d.Hours()/24)
}

// Name names a container, safe to print: by its id if it has no name.
func Name(id api.ID, name string) string {
	return cmp.Or(cli.ShowText(name), "id "+id.String())
}

// Whom describes a container that a verb has changed.
func Whom(name, source string, id api.ID) string {
	return fmt.Sprintf("%s (%s, id %s)", cli.Show(name), cli.Show(source), id)
}

// If returns the text of a cell only if the condition holds.
func If(is bool, text string) string {
	if is {
		return text
	}
	return ""
}
