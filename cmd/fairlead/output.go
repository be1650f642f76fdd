package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// format is the value of -o.
type format struct{ name string }

func formatFlag(cmd *cobra.Command) *format {
	f := &format{}
	cmd.Flags().StringVarP(&f.name, "output", "o", "table", "output format: table, json or yaml")
	before := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		switch f.name {
		case "table", "json", "yaml":
		default:
			return usagef("-o %q: must be table, json or yaml", f.name)
		}
		if before != nil {
			return before(cmd, args)
		}
		return nil
	}
	return f
}

// print prints v, a wire type, as JSON or YAML, or calls table.
func (f *format) print(w io.Writer, v any, table func(io.Writer)) error {
	out := page{columns: terminalWidth(w)}
	switch f.name {
	case "table":
		table(&out)
	default:
		data, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("print as %s: %w", f.name, err)
		}
		if f.name == "yaml" {
			err = writeYAML(&out, data)
		} else {
			err = json.Indent(&out.Buffer, data, "", "  ")
			out.WriteByte('\n')
		}
		if err != nil {
			return fmt.Errorf("print as %s: %w", f.name, err)
		}
		_, err = w.Write(escapeControls(out.Bytes(), f.name == "yaml"))
		return err
	}
	_, err := w.Write(out.Bytes())
	return err
}

// page is what a table is printed on. columns is the width of the terminal; 0: none is known.
type page struct {
	bytes.Buffer
	columns int
}

// across is the width of a line on w: the terminal's, or else the one given.
func across(w io.Writer, otherwise int) int {
	if p, ok := w.(*page); ok && p.columns > 0 {
		return p.columns
	}
	return otherwise
}

// answer prints the agent's answer, or returns its error.
func answer[T any](e env, f *format, v T, err error, table func(io.Writer, T)) error {
	if err != nil {
		return err
	}
	return f.print(e.stdout, v, func(w io.Writer) { table(w, v) })
}

// line is print for one of many values: each is one line of JSON, or a YAML document.
func (f *format) line(w io.Writer, v any, table func(io.Writer)) error {
	switch f.name {
	case "json":
		data, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("print as json: %w", err)
		}
		_, err = w.Write(append(escapeControls(data, false), '\n'))
		return err
	case "yaml":
		if _, err := io.WriteString(w, "---\n"); err != nil {
			return err
		}
	}
	return f.print(w, v, table)
}

// escapeControls escapes the control and formatting characters that encoding/json leaves
// (DEL, the C1 controls, marks that reverse the text), so that the output cannot control a
// terminal. The meaning stays the same: such characters occur only in strings, and YAML
// strings with them are written like JSON's.
func escapeControls(data []byte, yaml bool) []byte {
	var out bytes.Buffer
	for _, r := range string(data) {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			out.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&out, `\u%04x`, r)
		case yaml:
			fmt.Fprintf(&out, `\U%08x`, r)
		default:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, high, low)
		}
	}
	return out.Bytes()
}

// show makes a string that a container may have chosen safe to print. A printable string
// stays as it is; any other becomes a Go string literal.
func show(s string) string {
	if s == "" {
		return "-"
	}
	return showText(s)
}

// showText is show for text that may be empty.
func showText(s string) string {
	for _, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return strconv.Quote(s)
		}
	}
	return s
}

// shown is show for each of several.
func shown(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = show(s)
	}
	return out
}

// lines is show for a text of several lines.
func lines(s string) string {
	parts := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, p := range parts {
		parts[i] = showText(strings.ReplaceAll(p, "\t", "    "))
	}
	return strings.Join(parts, "\n")
}

// oneLine is show for a text of several lines that is printed in one.
func oneLine(s string) string {
	return showText(strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' }), "; "))
}

// cut shortens s to n characters.
func cut(s string, n int) string {
	if n <= 0 || utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// fold breaks s at spaces into lines of at most n characters.
func fold(s string, n int) []string {
	var out []string
	line := ""
	for _, word := range strings.Fields(s) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > n {
			out, line = append(out, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(out, line)
}

// column is the head of a column and the maximum width of its cells; 0 is no limit. On a
// terminal whose width is known, cells with a maximum take what room there is, and give way
// where there is none.
type column struct {
	head string
	max  int
}

// width is the width of c as the i-th column.
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
	columns = suit(columns, rows, across(w, 0))
	widths := make([]int, len(columns))
	all := append([][]string{make([]string, len(columns))}, rows...)
	for i, c := range columns {
		all[0][i], widths[i] = c.head, c.width(i, rows)
	}
	for _, row := range all {
		for i, cell := range row {
			row[i] = cut(cell, columns[i].max)
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

// leastCut is how short a cell is cut to make a table fit.
const leastCut = 9

// suit gives the columns that are cut the width of a terminal; 0: it is not known.
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
