package main

import (
	"context"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestTally(t *testing.T) {
	known, err := readLists(testkit.Tree(t, map[string]string{
		"expected-skips.txt": "\n# comment\na Test.*: no gas  # the station is closed\n",
		"bounds.txt":         "a 10  # it is long\n* 2  # the rest\n",
	}))
	testkit.Must(t, err)
	line := func(s string) string { return s + "\n" }
	ran := func(pkg, until string) string {
		return line(`{"Time":"2026-11-22T00:00:00Z","Action":"run","Package":"m/`+pkg+`","Test":"TestA"}`) +
			line(`{"Action":"pass","Package":"m/`+pkg+`","Test":"TestA"}`) +
			line(`{"Time":"2026-11-22T`+until+`Z","Action":"pass","Package":"m/`+pkg+`"}`)
	}
	tests := []struct {
		name, events string
		ok           bool
		want         []string // substrings of the output
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
		{"slow", ran("a", "00:00:59"), true, []string{"slow: a took 59s, and should take 10s\n1 passed, 0 failed"}},
		{"far too slow", ran("a", "00:01:01"), false, []string{"failed: a took 1m1s, and should take 10s\n1 passed, 1 failed"}},
		{"slow as all may be", ran("c", "00:00:05"), true, []string{"slow: c took 5s, and should take 2s"}},
		{"slowest tests, without subtests", line(`{"Action":"pass","Package":"m/a","Test":"TestA","Elapsed":1}`) +
			line(`{"Action":"pass","Package":"m/b","Test":"TestB/x","Elapsed":9}`) + line(`{"Action":"fail","Package":"m/b","Test":"TestB","Elapsed":12}`),
			false, []string{"took   12.0 s: b TestB\ntook    1.0 s: a TestA\nfailed: b TestB"}},
		{"not json", "warning: odd\n" + line(`{"Action":"pass","Package":"m/a","Test":"TestA"}`), true, []string{"warning: odd\n"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			ta := newTally(&out, "m", known)
			testkit.Must(t, testkit.Err(ta.read(strings.NewReader(tt.events))))
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

// TestUnfinished expects tests that began and did not end to be named when the time is over.
func TestUnfinished(t *testing.T) {
	var out strings.Builder
	ta := newTally(&out, "m", knowledge{})
	_, err := ta.read(strings.NewReader(`{"Action":"pass","Package":"m/a","Test":"TestA"}
{"Action":"pass","Package":"m/a"}
{"Action":"output","Package":"m/b","Test":"TestB","Output":"=== RUN   TestB\n"}
`))
	ta.unfinished(true)
	if err != nil || ta.close() {
		t.Errorf("%v; a run that was ended is no success", err)
	}
	want := "failed: b TestB (did not end)\n=== RUN   TestB\nfailed: the run (its time was over)\n1 passed, 2 failed, 0 skipped\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
}

// TestLimit expects a hanging go test to be ended with its children when the time is over. Here the
// time is over once the tally has printed a test that ends after the hanging one has begun.
func TestLimit(t *testing.T) {
	t.Chdir(testkit.Tree(t, map[string]string{
		"go.mod": "module m\n\ngo 1.26\n",
		"a_test.go": "package a\n\nimport (\n\t\"testing\"\n\t\"time\"\n)\n\n" +
			"func TestA(t *testing.T) {\n\tt.Parallel()\n\ttime.Sleep(time.Hour)\n}\n\nfunc TestB(t *testing.T) { t.Fail() }\n",
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &trigger{on: "--- FAIL: TestB", do: cancel}
	ta := newTally(out, "m", knowledge{})
	testkit.Must(t, ta.run(ctx, []string{"-count=1", "."}))
	if ta.close() || !strings.Contains(out.String(), "failed: m TestA (did not end)") {
		t.Errorf("got\n%s", out)
	}
}

// trigger calls do once on has been written.
type trigger struct {
	text strings.Builder
	on   string
	do   func()
}

func (w *trigger) Write(p []byte) (int, error) {
	n, err := w.text.Write(p)
	if strings.Contains(w.String(), w.on) {
		w.do()
	}
	return n, err
}

func (w *trigger) String() string { return w.text.String() }

func TestLists(t *testing.T) {
	for _, tt := range []struct{ file, data, want string }{
		{"expected-skips.txt", "# x\na b: c\n", "txt:2: no reason"},
		{"expected-skips.txt", "a b: c  # \n", "txt:1: no reason"},
		{"expected-skips.txt", "a (b: c  # why\n", "txt:1: error parsing regexp"},
		{"bounds.txt", "a ten  # why\n", "txt:1: want PACKAGE SECONDS"},
		{"bounds.txt", "a 0  # why\n", "txt:1: want PACKAGE SECONDS"},
	} {
		files := map[string]string{"expected-skips.txt": "", "bounds.txt": ""}
		files[tt.file] = tt.data
		testkit.Fails(t, tt.data, testkit.Err(readLists(testkit.Tree(t, files))), tt.want)
	}
}

// TestOwnLists reads the lists of this project.
func TestOwnLists(t *testing.T) {
	testkit.Check(t, testkit.Err(readLists("..")))
}
