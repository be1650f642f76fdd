package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/goccy/go-yaml"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// What a parser makes of JSON or YAML is what was meant, and neither can send control sequences to a
// terminal.
func FuzzFormats(f *testing.F) {
	testkit.Seeds(f, `{}`, `[]`, `""`, `{"a":[{"b":1,"c":[]},{"d":{}}],"e":null}`, `[[1,[2,"x: y"]],"- z"]`, `{"true":"no","1":"2026-01-01","~":"#","a b":": "}`, `{"":{"":[""]}}`, `-1.5e300`, `1e300`, `[1E-30]`,
		`{"\u001b[2J\u202e":["\u007f","\u009b31m","\r\n\t","naïve 😀","\udb40\udc01"]}`)
	parsers := map[string]func([]byte, any) error{"json": json.Unmarshal, "yaml": func(data []byte, v any) error { return yaml.Unmarshal(data, v) }}
	f.Fuzz(func(t *testing.T, s string) {
		var want any
		if json.Unmarshal([]byte(s), &want) != nil || strings.Count(s, "[")+strings.Count(s, "{") > 100 {
			return
		}
		for name, parse := range parsers {
			var out bytes.Buffer
			testkit.Must(t, (&Format{Name: name}).Print(&out, want, nil))
			if bytes.ContainsFunc(out.Bytes(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
				t.Errorf("%q: control characters in %q", s, &out)
			}
			var parsed, got any
			err := parse(out.Bytes(), &parsed)
			data, bad := json.Marshal(parsed) // for the types of numbers
			testkit.Must(t, errors.Join(err, bad, json.Unmarshal(data, &got)))
			testkit.Same(t, s+" as "+out.String(), want, got)
		}
	})
}

func TestYAML(t *testing.T) {
	in := `{"a":[{"b":1,"c":[],"l":["x",["y"]]},{"d":{},"e":{"f":"g"}}],"h":null,"i":"yes","j":"x y","on":true}`
	var out bytes.Buffer
	testkit.Must(t, writeYAML(&out, []byte(in)))
	want := `a:
  - b: 1
    c: []
    l:
      - x
      - - "y"
  - d: {}
    e:
      f: g
h: null
i: "yes"
j: "x y"
"on": true
`
	testkit.Same(t, "printed", want, out.String())
}
