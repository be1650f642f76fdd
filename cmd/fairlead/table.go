package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// column is the head of a column and the maximum width of its cells; 0 is no limit. On a terminal
// of known width, cells with a maximum grow into free space, and shrink where there is none.
type column struct {
	head string
	max  int
}

// width returns the width of c as the i-th column.
func (c column) width(i int, rows [][]string) int {
	wide := utf8.RuneCountInString(c.head)
	for _, row := range rows {
		wide = max(wide, utf8.RuneCountInString(row[i]))
	}
	if c.max > 0 {
		wide = min(wide, c.max)
	}
	return wide
}

// table prints rows under their heads, with two spaces between columns. The cells must be
// safe to print.
func table(w io.Writer, columns []column, rows [][]string) {
	columns = suit(columns, rows, cli.Across(w, 0))
	widths := make([]int, len(columns))
	all := append([][]string{make([]string, len(columns))}, rows...)
	for i, c := range columns {
		all[0][i], widths[i] = c.head, c.width(i, rows)
	}
	for _, row := range all {
		for i, cell := range row {
			row[i] = cli.Cut(cell, columns[i].max)
		}
	}
	for _, row := range all {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(cell)
			if i < len(row)-1 {
				line.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+2))
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// leastCut is the least width to which a cell is cut to make a table fit.
const leastCut = 9

// suit adapts the columns with a maximum to the terminal's width have; 0 means unknown.
func suit(columns []column, rows [][]string, have int) []column {
	if have == 0 {
		return columns
	}
	columns = slices.Clone(columns)
	total := width(columns, rows) - 2
	for i, c := range columns {
		if room := min(column{head: c.head}.width(i, rows)-c.width(i, rows), have-total); c.max > 0 && room > 0 {
			columns[i].max, total = c.width(i, rows)+room, total+room
		}
	}
	for ; total > have; total-- {
		widest := -1
		for i, c := range columns {
			if n := c.width(i, rows); c.max > 0 && n > leastCut && (widest < 0 || n > columns[widest].width(widest, rows)) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		columns[widest].max = columns[widest].width(widest, rows) - 1
	}
	return columns
}

// ago formats the time from t to now, in one unit.
func ago(t, now time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "never"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s ago", int(max(d, 0).Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return fmt.Sprintf("%d days ago", int(d.Hours()/24))
}

func span(d time.Duration) string { return columns.Span(d) }

// right aligns columns first to last, and their heads, to the right.
func right(columns []column, rows [][]string, first, last int) {
	for i := first; i <= last; i++ {
		wide := column{head: columns[i].head}.width(i, rows) // a number is never cut
		columns[i].head = fmt.Sprintf("%*s", wide, columns[i].head)
		for _, row := range rows {
			row[i] = fmt.Sprintf("%*s", wide, row[i])
		}
	}
}

// width is the width of columns, including the space after each.
func width(columns []column, rows [][]string) int {
	sum := 0
	for i, c := range columns {
		sum += c.width(i, rows) + 2
	}
	return sum
}
