package main

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
		{"a flake", line(`{"Action":"output","Package":"m/a","Test":"TestA/b","Output":"    x.go:1: accounted flake: TestB\n"}`) +
			line(`{"Action":"pass","Package":"m/a","Test":"TestA/b"}`),
			true, []string{"flaky: a TestA/b failed, and passed when it was run again\n1 passed, 0 failed, 0 skipped"}},
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

// What is run again are the tests that failed, if that is all that went wrong.
func TestLost(t *testing.T) {
	failed := func(pkg, test string) string {
		return `{"Action":"fail","Package":"m/` + pkg + `","Test":"` + test + `"}` + "\n"
	}
	exit := func(pkg, said string) string {
		return fmt.Sprintf(`{"Action":"output","Package":"m/%s","Output":"%s\n"}`, pkg, said) + "\n" +
			fmt.Sprintf(`{"Action":"fail","Package":"m/%s"}`, pkg) + "\n"
	}
	const left = "--- FAIL: these are left after the tests:"
	tests := failed("a", "TestA/x") + failed("a", "TestA") + failed("b", "TestB") + failed("b", "TestC")
	three := tests + exit("a", "FAIL") + exit("b", "FAIL")
	for _, tt := range []struct {
		name, events string
		most         int
		want         map[string][]string
	}{
		{"three", three, 3, map[string][]string{"m/a": {"TestA"}, "m/b": {"TestB", "TestC"}}},
		{"too many", three, 2, nil},
		{"and a leak elsewhere", three + `{"Action":"fail","Package":"m/c"}`, 3, nil},
		{"and a leak", three + exit("b", left), 3, nil},
		{"and a panic, after which none was run", tests + exit("a", "panic: late") + exit("b", "FAIL"), 3, nil},
		{"none", "", 3, map[string][]string{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ta := newTally(io.Discard, "m", nil)
			if err := ta.read(strings.NewReader(tt.events)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, ta.lost(tt.most)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestForgive(t *testing.T) {
	var out strings.Builder
	ta := newTally(&out, "m", nil)
	ta.fail(nil, "c (the package, outside its tests)")
	err := ta.read(strings.NewReader(`{"Action":"fail","Package":"m/a","Test":"TestA/x"}
{"Action":"fail","Package":"m/a","Test":"TestA"}
{"Action":"fail","Package":"m/a","Test":"TestD"}
{"Action":"fail","Package":"m/b","Test":"TestB"}
`))
	ta.forgive("m/a", []string{"TestA", "TestB"}) // TestD may have been skipped
	if err != nil || ta.close() {
		t.Errorf("%v; what was not forgiven is no failure", err)
	}
	want := "flaky: a TestA (0s) failed, and passed when it was run again\nfailed: c (the package, outside its tests)\nfailed: a TestD (0s)\nfailed: b TestB (0s)\n2 passed, 3 failed, 0 skipped\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
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
