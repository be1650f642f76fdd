package main

import (
	"strings"
	"testing"
)

func TestTally(t *testing.T) {
	const skips = `
# comment
a Test.*: no gas  # the station is closed
`
	line := func(s string) string { return s + "\n" }
	tests := []struct {
		name, events string
		ok           bool
		want         []string // in the output
	}{
		{"pass", line(`{"Action":"pass","Package":"m/a","Test":"TestA"}`) +
			line(`{"Action":"output","Package":"m/a","Output":"PASS\n"}`) +
			line(`{"Action":"output","Package":"m/a","Output":"ok  \tm/a\t0.1s\n"}`) +
			line(`{"Action":"pass","Package":"m/a"}`),
			true, []string{"ok  \tm/a\t0.1s\n", "1 passed, 0 failed, 0 skipped\n"}},
		{"nothing ran", line(`{"Action":"skip","Package":"m/a"}`), false, []string{"0 passed, 0 failed, 0 skipped"}},
		{"failed test shows its output and is counted once", line(`{"Action":"output","Package":"m/a","Test":"TestA","Output":"boom\n"}`) +
			line(`{"Action":"fail","Package":"m/a","Test":"TestA","Elapsed":0.5}`) +
			line(`{"Action":"fail","Package":"m/a"}`),
			false, []string{"boom\n", "failed: a TestA (500ms)\nboom\n0 passed, 1 failed, 0 skipped"}},
		{"leak", line(`{"Action":"pass","Package":"m/a","Test":"TestA"}`) +
			line(`{"Action":"fail","Package":"m/a"}`),
			false, []string{"failed: a (the package, outside its tests)", "1 passed, 1 failed, 0 skipped"}},
		{"timeout", line(`{"Action":"output","Package":"m/a","Test":"TestA","Output":"panic: late\n"}`) +
			line(`{"Action":"fail","Package":"m/a"}`),
			false, []string{"panic: late", "failed: a TestA (did not end)", "0 passed, 1 failed"}},
		{"does not build", line(`{"ImportPath":"m/a","Action":"build-output","Output":"a.go:1: oops\n"}`) +
			line(`{"Action":"fail","Package":"m/a"}`),
			false, []string{"a.go:1: oops", "0 passed, 1 failed"}},
		{"expected skip", line(`{"Action":"pass","Package":"m/a","Test":"TestA"}`) +
			line(`{"Action":"output","Package":"m/a","Test":"TestB","Output":"    x.go:1: accounted skip: TestB: no gas\n"}`) +
			line(`{"Action":"skip","Package":"m/a","Test":"TestB"}`),
			true, []string{"skipped: a TestB: no gas (fine: the station is closed)", "1 passed, 0 failed, 1 skipped"}},
		{"unexpected skip", line(`{"Action":"output","Package":"m/a","Test":"TestB","Output":"    x.go:1: accounted skip: TestB: no gas left\n"}`) +
			line(`{"Action":"skip","Package":"m/a","Test":"TestB"}`),
			false, []string{"unexpected skip: a TestB: no gas left", "0 passed, 1 failed, 0 skipped"}},
		{"silent skip", line(`{"Action":"output","Package":"m/a","Test":"TestB","Output":"    x.go:1: no gas\n"}`) +
			line(`{"Action":"skip","Package":"m/a","Test":"TestB"}`),
			false, []string{"skipped without a reason"}},
		{"not json", "warning: odd\n" + line(`{"Action":"pass","Package":"m/a","Test":"TestA"}`), true, []string{"warning: odd\n"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			expected, err := parseSkips("skips", skips)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			ta := newTally(&out, "m", expected)
			if err := ta.read(strings.NewReader(tt.events)); err != nil {
				t.Fatal(err)
			}
			if ok := ta.close(); ok != tt.ok {
				t.Errorf("ok = %v, want %v", ok, tt.ok)
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("%q is not in the output:\n%s", w, &out)
				}
			}
		})
	}
}

func TestParseSkipsErrors(t *testing.T) {
	for _, tt := range []struct{ data, want string }{
		{"# x\na b: c\n", "f:2: no reason"},
		{"a b: c  # \n", "f:1: no reason"},
		{"a (b: c  # why\n", "f:1: error parsing regexp"},
	} {
		if _, err := parseSkips("f", tt.data); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("parseSkips(%q) = %v, want %q", tt.data, err, tt.want)
		}
	}
}
