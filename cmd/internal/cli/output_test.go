package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func FuzzYAML(f *testing.F) {
	testkit.Seeds(f, `{}`, `[]`, `""`, `{"a":[{"b":1,"c":[]},{"d":{}}],"e":null}`, `[[1,[2,"x: y"]],"- z"]`, `{"true":"no","1":"2026-01-01","~":"#","a b":": "}`, `{"":{"":[""]}}`, `-1.5e300`, `1e300`, `[1E-30]`)
	f.Fuzz(func(t *testing.T, s string) {
		var want any
		if json.Unmarshal([]byte(s), &want) != nil || strings.Count(s, "[")+strings.Count(s, "{") > 100 {
			return
		}
		doc, err := json.Marshal(want) // as the API writes it: no key twice
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		var out bytes.Buffer
		if err := writeYAML(&out, doc); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		printed := escapeControls(out.Bytes(), true)
		if bytes.ContainsFunc(printed, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
			t.Errorf("%q: control characters in %q", s, printed)
		}
		// What a parser makes of it is what was meant.
		var back any
		if err := yaml.Unmarshal(printed, &back); err != nil {
			t.Fatalf("%q: %v\n%s", s, err, printed)
		}
		data, err := json.Marshal(back)
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		var got any
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s\n%s", s, diff, printed)
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
