package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is one line of go test -json (see go doc test2json). It has only the fields used here.
type event struct {
	Time       time.Time
	Action     string
	Package    string
	ImportPath string // of a build-output
	Test       string
	Output     string
	Elapsed    float64
}

// tally counts results and prints what a person wants to see.
type tally struct {
	mu     sync.Mutex // groups may run side by side
	out    io.Writer
	module string // prefix of package paths that is not printed
	known  knowledge

	passed, failed, skipped int

	output   map[string]map[string][]string // package, test: its output so far
	began    map[string]time.Time           // package: when its first test did
	broken   map[string]int                 // package: number of failed tests
	problems []problem                      // printed again at the end
	slow     []string                       // packages that took longer than they should
	times    []timed                        // of top-level tests
}

// timed is a top-level test and its time in seconds.
type timed struct {
	name    string
	seconds float64
}

// problem is one failure and its output.
type problem struct{ what, output string }

// again is the number of lines of a failure that are repeated at the end, for readers who have only
// the end of a log.
const again = 30

// slowest is the number of tests listed with their times at the end of a run.
const slowest = 20

// tooSlow is the factor beyond its bound at which a slow package is a failure. A machine with two
// other busy threads on every CPU is three times slower.
const tooSlow = 6

func newTally(out io.Writer, module string, known knowledge) *tally {
	return &tally{
		out: out, module: module + "/", known: known,
		output: map[string]map[string][]string{},
		began:  map[string]time.Time{},
		broken: map[string]int{},
	}
}

// line parses one line of go test -json, and reports whether it is a failure.
func (t *tally) line(line string) (wrong bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var e event
	if json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
		io.WriteString(t.out, line)
		return false
	}
	t.take(e)
	return e.Action == "fail"
}

func (t *tally) take(e event) {
	tests := t.output[e.Package]
	if tests == nil {
		tests = map[string][]string{}
		t.output[e.Package] = tests
	}
	short := strings.TrimPrefix(e.Package, t.module)
	switch e.Action {
	case "run":
		if _, ok := t.began[e.Package]; !ok {
			t.began[e.Package] = e.Time
		}
	case "build-output":
		io.WriteString(t.out, e.Output)
	case "output":
		switch {
		case e.Test != "":
			tests[e.Test] = append(tests[e.Test], e.Output)
		case e.Output != "PASS\n":
			io.WriteString(t.out, e.Output)
		}
	case "pass":
		if e.Test == "" {
			if began, ok := t.began[e.Package]; ok {
				t.took(short, e.Time.Sub(began))
			}
			delete(t.output, e.Package)
			return
		}
		t.passed++
		t.timed(short, e)
		delete(tests, e.Test)
	case "fail":
		if e.Test == "" {
			t.packageFailed(e.Package, short, tests)
			delete(t.output, e.Package)
			return
		}
		t.broken[e.Package]++
		took := time.Duration(e.Elapsed * float64(time.Second)).Round(10 * time.Millisecond)
		t.fail(tests[e.Test], "%s %s (%s)", short, e.Test, took)
		t.timed(short, e)
		delete(tests, e.Test)
	case "skip":
		if e.Test == "" {
			delete(t.output, e.Package)
			return // a package without tests
		}
		t.skip(short, e.Test, strings.Join(tests[e.Test], ""))
		delete(tests, e.Test)
	}
}

// timed keeps the time of a test that has ended, unless that is short. A subtest's is part of its
// parent's.
func (t *tally) timed(short string, e event) {
	if e.Elapsed >= 1 && !strings.Contains(e.Test, "/") {
		t.times = append(t.times, timed{short + " " + e.Test, e.Elapsed})
	}
}

// took compares the time of a package's tests with its bound. Before the first test, a package may
// have waited for its turn.
func (t *tally) took(short string, took time.Duration) {
	bound, ok := t.known.bounds[short]
	if !ok {
		bound, ok = t.known.bounds["*"]
	}
	took = took.Round(time.Second)
	switch {
	case !ok || took <= bound:
	case took > tooSlow*bound:
		t.fail(nil, "%s took %v, and should take %v", short, took, bound)
	default:
		t.slow = append(t.slow, fmt.Sprintf("%s took %v, and should take %v", short, took, bound))
	}
}

// packageFailed counts a failure that belongs to no test (the package does not build, left
// something behind, or ran out of time), and prints the output of the tests that never ended.
func (t *tally) packageFailed(path, short string, tests map[string][]string) {
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		t.broken[path]++
		t.fail(tests[name], "%s %s (did not end)", short, name)
	}
	if t.broken[path] == 0 {
		t.fail(nil, "%s (the package, outside its tests)", short)
	}
}

// unfinished counts the tests that still ran when the run was ended.
func (t *tally) unfinished(late bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(t.output)) {
		t.packageFailed(path, strings.TrimPrefix(path, t.module), t.output[path])
	}
	if late {
		t.fail(nil, "the run (its time was over)")
	} else {
		t.fail(nil, "the run (interrupted)")
	}
}

// fail counts a failure and prints its output.
func (t *tally) fail(output []string, format string, args ...any) {
	t.failed++
	io.WriteString(t.out, strings.Join(output, ""))
	tail := output[max(0, len(output)-again):]
	t.problems = append(t.problems, problem{what: fmt.Sprintf(format, args...), output: strings.Join(tail, "")})
}

// skip counts one skipped test. It is a failure unless it is accounted for (see testkit.Skip) and
// expected.
func (t *tally) skip(short, test, output string) {
	_, rest, ok := strings.Cut(output, "accounted skip: "+test+": ")
	if !ok {
		t.fail([]string{output}, "%s %s: skipped without a reason; call testkit.Skip", short, test)
		return
	}
	reason, _, _ := strings.Cut(rest, "\n")
	line := short + " " + test + ": " + reason
	if x, ok := match(t.known.skips, line); ok {
		t.skipped++
		fmt.Fprintf(t.out, "skipped: %s (fine: %s)\n", line, x.why)
		return
	}
	t.fail(nil, "unexpected skip: %s", line)
}

// close prints the closing lines and reports whether the run passed.
func (t *tally) close() bool {
	for _, s := range t.slow {
		fmt.Fprintf(t.out, "slow: %s\n", s)
	}
	slices.SortStableFunc(t.times, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, x := range t.times[:min(slowest, len(t.times))] {
		fmt.Fprintf(t.out, "took %6.1f s: %s\n", x.seconds, x.name)
	}
	for _, p := range t.problems {
		fmt.Fprintf(t.out, "failed: %s\n%s", p.what, p.output)
	}
	fmt.Fprintf(t.out, "%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped)
	return t.failed == 0 && t.passed > 0
}
