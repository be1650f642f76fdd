package verb

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/google/go-cmp/cmp"
)

func TestConfigFile(t *testing.T) {
	for _, x := range []struct{ text, want string }{
		{"", ""},
		{"# nothing\n", ""},
		{"---\nsocket: a\n", ""},
		{"- a\n", `config f:1: must be lines of the form "key: value"`},
		{"word\n", `config f:1: must be lines of the form "key: value"`},
		{"a: b\nsocket: [x]\n", "config f:2: socket: the value must be a word or a number"},
		{"socket: {x: y}\n", "config f:1: socket: the value must be a word or a number"},
		{"socket: a\nsocket: b\n", "already"},
		{"socket: \"a\n", "config f: "},
	} {
		testkit.Says(t, x.text, testkit.Err(parseConfig("f", []byte(x.text))), x.want)
	}
	got, err := parseConfig("f", []byte("a: 1\nb: \"x y\"\nc: 127.0.0.1:9643\nd:\ne: true\nf: 'q'\n"))
	want := []setting{{"a", "1", 1}, {"b", "x y", 2}, {"c", "127.0.0.1:9643", 3}, {"d", "", 4}, {"e", "true", 5}, {"f", "q", 6}}
	testkit.Check(t, err)
	testkit.Same(t, "settings", want, got, cmp.AllowUnexported(setting{}))
}

func FuzzConfigFile(f *testing.F) {
	for _, s := range []string{"a: b", "a: [b]", "{a: b}", "? a\n: b", "&x a: *x", "a: |\n  b", "!!str a: b", "a: b\n---\nc: d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		settings, err := parseConfig("f", []byte(s))
		if err == nil {
			for _, x := range settings {
				if x.line < 1 {
					t.Errorf("%q: %+v", s, x)
				}
			}
		}
	})
}
