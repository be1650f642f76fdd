package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/view"
)

// Format is the value of -o.
type Format struct{ Name string }

// FormatFlag adds -o to a verb. more are formats beside table, json and yaml, which the verb prints
// itself.
func FormatFlag(cmd *cobra.Command, more ...string) *Format {
	f := &Format{}
	names := append([]string{"table", "json", "yaml"}, more...)
	last := len(names) - 1
	words := strings.Join(names[:last], ", ") + " or " + names[last]
	cmd.Flags().StringVarP(&f.Name, "output", "o", "table", "output format: "+words)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if !slices.Contains(names, f.Name) {
			return Usagef("-o %q: must be %s", f.Name, words)
		}
		return nil
	}
	return f
}

// Print prints v, a wire type, as JSON or YAML, or calls table.
func (f *Format) Print(w io.Writer, v any, table func(io.Writer)) error {
	out := page{columns: terminalWidth(w)}
	if f.Name == "table" {
		table(&out)
		_, err := w.Write(out.Bytes())
		return err
	}
	data, err := json.Marshal(v)
	if err == nil && f.Name == "yaml" {
		err = writeYAML(&out, data)
	} else if err == nil {
		err = json.Indent(&out.Buffer, data, "", "  ")
		out.WriteByte('\n')
	}
	if err != nil {
		return fmt.Errorf("print as %s: %w", f.Name, err)
	}
	_, err = w.Write(escapeControls(out.Bytes(), f.Name == "yaml"))
	return err
}

// page is what a table is printed on. columns is the width of the terminal; 0: none is known.
type page struct {
	bytes.Buffer
	columns int
}

// Across is the width of a line on w: the terminal's, or else the one given.
func Across(w io.Writer, otherwise int) int {
	if p, ok := w.(*page); ok && p.columns > 0 {
		return p.columns
	}
	if _, ok := w.(endless); ok {
		return math.MaxInt32
	}
	return otherwise
}

// endless is a page whose lines have no end.
type endless struct{ io.Writer }

// Wide returns w, or, for --wide, w with lines of any width.
func Wide(w io.Writer, is bool) io.Writer {
	if is {
		return endless{w}
	}
	return w
}

// Answer prints the agent's answer, or returns its error.
func Answer[T any](e Env, f *Format, v T, err error, table func(io.Writer, T)) error {
	if err != nil {
		return err
	}
	return f.Print(e.Stdout, v, func(w io.Writer) { table(w, v) })
}

// Line is Print for one of many values: each is one line of JSON, or a YAML document.
func (f *Format) Line(w io.Writer, v any, table func(io.Writer)) error {
	switch f.Name {
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
	return f.Print(w, v, table)
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

// Show makes a string that a container may have chosen safe to print, as the views do.
func Show(s string) string { return view.Show(s) }

// ShowText is Show for text that may be empty.
func ShowText(s string) string { return view.ShowText(s) }

// Lines is Show for a text of several lines.
func Lines(s string) string {
	parts := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, p := range parts {
		parts[i] = ShowText(strings.ReplaceAll(p, "\t", "    "))
	}
	return strings.Join(parts, "\n")
}

// OneLine is Show for a text of several lines that is printed in one.
func OneLine(s string) string {
	return ShowText(strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' }), "; "))
}

// Cut shortens s to n characters.
func Cut(s string, n int) string {
	if n <= 0 || utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// Fold breaks s at spaces into lines of at most n characters.
func Fold(s string, n int) []string {
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

// terminalWidth is the number of columns of a terminal; 0: it is none, or does not say.
func terminalWidth(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			return int(size.Col)
		}
	}
	return 0
}

// Terminal reports whether w is a terminal.
func Terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// writeYAML writes a JSON document as YAML, with the fields in the same order. Strings that
// are not plain words stay JSON strings, which are valid YAML. So neither a parser nor a
// terminal can misinterpret them. (goccy/go-yaml 1.19 writes control characters as they
// are, and 1e300 so that it reads back as a string.)
func writeYAML(w io.Writer, data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var out strings.Builder
	if err := yamlValue(&out, dec, 0, true); err != nil {
		return err
	}
	_, err := io.WriteString(w, strings.TrimLeft(out.String(), "\n "))
	return err
}

// yamlValue writes the next value of dec at a depth. An object or a list begins on a line of
// its own, except within a list.
func yamlValue(out *strings.Builder, dec *json.Decoder, depth int, fresh bool) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	switch t := tok.(type) {
	case json.Delim:
		if !dec.More() {
			_, err := dec.Token()
			out.WriteString(map[json.Delim]string{'{': " {}\n", '[': " []\n"}[t])
			return err
		}
		if !fresh {
			out.WriteString("\n")
		}
		for n := 0; dec.More(); n++ {
			if n > 0 || !fresh || t == '[' {
				out.WriteString(strings.Repeat("  ", depth))
			}
			if t == '[' {
				out.WriteString("-")
				if err := yamlItem(out, dec, depth+1); err != nil {
					return err
				}
				continue
			}
			key, err := dec.Token()
			if err != nil {
				return err
			}
			out.WriteString(yamlString(key.(string)) + ":")
			if err := yamlValue(out, dec, depth+1, false); err != nil {
				return err
			}
		}
		_, err := dec.Token()
		return err
	case string:
		fmt.Fprintf(out, " %s\n", yamlString(t))
	case json.Number:
		fmt.Fprintf(out, " %s\n", yamlNumber(string(t)))
	case nil:
		out.WriteString(" null\n")
	default:
		fmt.Fprintf(out, " %v\n", t)
	}
	return nil
}

// yamlItem writes an element of a list after its dash. The first field of an object is on
// the line of the dash.
func yamlItem(out *strings.Builder, dec *json.Decoder, depth int) error {
	var item strings.Builder
	if err := yamlValue(&item, dec, depth, true); err != nil {
		return err
	}
	out.WriteString(" " + strings.TrimLeft(item.String(), " "))
	return nil
}

// yamlNumber formats a JSON number so that every YAML parser reads it as a number. Some
// accept an exponent only after a fraction.
func yamlNumber(s string) string {
	if i := strings.IndexAny(s, "eE"); i >= 0 && !strings.Contains(s, ".") {
		return s[:i] + ".0" + s[i:]
	}
	return s
}

var plainWord = regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./@-]*$`)

func yamlString(s string) string {
	switch strings.ToLower(s) {
	case "true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf":
	default:
		if plainWord.MatchString(s) {
			return s
		}
	}
	data, _ := json.Marshal(s) // never fails for a string
	return string(data)
}
