package columns

import (
	"bytes"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

type row struct{ name, state, note, figure string }

func declared(all bool) []Column[row] {
	return []Column[row]{
		Text("NAME", func(r row) string { return r.name }).Cut(12),
		Number("FIGURE", func(r row) string { return r.figure }),
		Text("STATE", func(r row) string { return r.state }).Spare(true).When(all),
		Plain("NOTE", func(r row) string { return r.note }).Rest(40).Spare(true),
	}
}

func TestPrint(t *testing.T) {
	rows := []row{
		{"web", "done", "a note of some length that does not fit", "1.5"},
		{"a-name-that-is-cut", "", "", ""},
		{"e\x1b[0m", "done", "short", "1000"},
	}
	for _, tt := range []struct {
		name string
		wide bool
		rows []row
		of   []Column[row]
		want string
	}{
		{"heads alone", false, nil, declared(true), "NAME  FIGURE  STATE  NOTE\n"},
		{"left out by condition", false, rows, declared(false), `NAME          FIGURE  NOTE
web              1.5  a note of some le…
a-name-that…       -
"e\x1b[0m"      1000  short
`},
		{"spare columns left out", false, []row{{"web", "a state that is long", "note", "1"}}, declared(true), `NAME  FIGURE  NOTE
web        1  note
`},
		{"wide", true, rows, declared(true), `NAME                FIGURE  STATE  NOTE
web                    1.5  done   a note of some length that does not fit
a-name-that-is-cut       -  -
"e\x1b[0m"            1000  done   short
`},
		{"no heads", false, rows, []Column[row]{Plain("", func(r row) string { return r.note }).Cut(6), Number("", func(r row) string { return r.figure })}, `a not…   1.5
           -
short   1000
`},
	} {
		var out bytes.Buffer
		Print(cli.Wide(&out, tt.wide), tt.rows, tt.of...)
		testkit.Same(t, tt.name, tt.want, out.String())
	}
}

// Where even names cut to the least leave too little, the spare columns go, and the rest is cut.
func TestPrintTooLong(t *testing.T) {
	long := []row{{strings.Repeat("n", 30), strings.Repeat("s", 30), "note", strings.Repeat("9", 30)}}
	columns := declared(true)
	columns[2] = columns[2].Spare(false)
	var out bytes.Buffer
	Print(&out, long, columns...)
	testkit.Same(t, "printed", "NAME              FIGURE  STATE\nnnnnnnnn…  999999999999…  sssssssssssss…\n", out.String())
}

func TestBelow(t *testing.T) {
	var out bytes.Buffer
	Below(&out, nil, declared(true)...)
	if out.Len() > 0 {
		t.Errorf("without rows: %q", out.String())
	}
	Below(&out, []row{{}}, declared(true)[:2]...)
	testkit.Same(t, "printed", "\nNAME  FIGURE\n-          -\n", out.String())
}

func TestNote(t *testing.T) {
	var out bytes.Buffer
	Note(&out, strings.TrimSpace(strings.Repeat("four ", 20)))
	testkit.Same(t, "printed", strings.Repeat("four ", 14)+"four\n  four four four four four\n", out.String())
}
