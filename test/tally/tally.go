package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is one line of go test -json (see go doc test2json), as far as it is
// read here.
type event struct {
	Action     string
	Package    string
	ImportPath string // of a build-output
	Test       string
	Output     string
	Elapsed    float64
}

// tally counts what happened and prints what a person wants to see of it.
type tally struct {
	out      io.Writer
	module   string // prefix of package paths that is not worth printing
	expected []expectation

	passed, failed, skipped int

	output   map[string]map[string][]string // package, test: what it printed so far
	broken   map[string]int                 // package: tests of it that failed
	problems []problem                      // told again at the end
	flaky    []string                       // what failed, and passed when it was run again
	good     map[string][]string            // package: tests of it that passed, without subtests
	ended    map[string]bool                // package: its tests did all run, and some failed
	debris   map[string]bool                // package: it left something behind
}

// problem is one failure and what it printed.
type problem struct {
	what, output string
	pkg, test    string // which to run again, "" if that is of no use
}

// again is how many lines of a failure are printed a second time, at the end,
// where somebody who has only the end of a log finds them.
const again = 30

// expectation is a skip that is fine.
type expectation struct {
	pattern *regexp.Regexp // of "PACKAGE TEST: REASON"
	why     string
}

// parseSkips reads a list of expected skips: on each line a regular expression
// for "PACKAGE TEST: REASON", two spaces, "# ", and why the skip is fine.
// Empty lines and lines that begin with # are comments.
func parseSkips(name, data string) ([]expectation, error) {
	var list []expectation
	n := 0
	for line := range strings.Lines(data) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, why, ok := strings.Cut(line, "  # ")
		if !ok || strings.TrimSpace(why) == "" {
			return nil, fmt.Errorf("%s:%d: no reason: want PATTERN, two spaces, # and the reason", name, n)
		}
		re, err := regexp.Compile("^(?:" + strings.TrimSpace(pattern) + ")$")
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		list = append(list, expectation{re, strings.TrimSpace(why)})
	}
	return list, nil
}

func newTally(out io.Writer, module string, expected []expectation) *tally {
	return &tally{
		out: out, module: module + "/", expected: expected,
		output: map[string]map[string][]string{},
		broken: map[string]int{},
		good:   map[string][]string{},
		ended:  map[string]bool{},
		debris: map[string]bool{},
	}
}

// read takes in the output of one go test -json until its end. A line that is
// no event is passed on as it is.
func (t *tally) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				t.take(e)
			} else {
				io.WriteString(t.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *tally) take(e event) {
	tests := t.output[e.Package]
	if tests == nil {
		tests = map[string][]string{}
		t.output[e.Package] = tests
	}
	short := strings.TrimPrefix(e.Package, t.module)
	switch e.Action {
	case "build-output":
		io.WriteString(t.out, e.Output)
	case "output":
		if strings.Contains(e.Output, "these are left after the tests") { // see testkit.Run
			t.debris[e.Package] = true
		}
		switch {
		case e.Test != "":
			tests[e.Test] = append(tests[e.Test], e.Output)
		case e.Output == "FAIL\n": // of the testing package, after the last test; a panic has none
			t.ended[e.Package] = true
			io.WriteString(t.out, e.Output)
		case e.Output != "PASS\n":
			io.WriteString(t.out, e.Output)
		}
	case "pass":
		if e.Test == "" {
			delete(t.output, e.Package)
			return
		}
		t.passed++
		if !strings.Contains(e.Test, "/") {
			t.good[e.Package] = append(t.good[e.Package], e.Test)
		}
		if out := strings.Join(tests[e.Test], ""); strings.Contains(out, "accounted flake: ") {
			io.WriteString(t.out, out) // how it failed
			t.flaky = append(t.flaky, short+" "+e.Test)
		}
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
		last := &t.problems[len(t.problems)-1]
		last.pkg = e.Package
		last.test, _, _ = strings.Cut(e.Test, "/")
		delete(tests, e.Test)
	case "skip":
		if e.Test == "" {
			return // a package without tests
		}
		t.skip(short, e.Test, strings.Join(tests[e.Test], ""))
		delete(tests, e.Test)
	}
}

// packageFailed counts a failure that belongs to no test (it does not build,
// it left something behind, it ran out of time), and shows what the tests that
// never ended had printed.
func (t *tally) packageFailed(path, short string, tests map[string][]string) {
	names := make([]string, 0, len(tests))
	for name := range tests {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		t.broken[path]++
		t.fail(tests[name], "%s %s (did not end)", short, name)
	}
	if t.broken[path] == 0 {
		t.fail(nil, "%s (the package, outside its tests)", short)
	}
}

// fail counts a failure and shows what it printed.
func (t *tally) fail(output []string, format string, args ...any) {
	t.failed++
	io.WriteString(t.out, strings.Join(output, ""))
	tail := output[max(0, len(output)-again):]
	t.problems = append(t.problems, problem{what: fmt.Sprintf(format, args...), output: strings.Join(tail, "")})
}

// skip counts one skipped test: a failure unless it is accounted for (see
// testkit.Skip) and expected.
func (t *tally) skip(short, test, output string) {
	_, rest, ok := strings.Cut(output, "accounted skip: "+test+": ")
	if !ok {
		t.fail([]string{output}, "%s %s: skipped without a reason; call testkit.Skip", short, test)
		return
	}
	reason, _, _ := strings.Cut(rest, "\n")
	line := short + " " + test + ": " + reason
	for _, x := range t.expected {
		if x.pattern.MatchString(line) {
			t.skipped++
			fmt.Fprintf(t.out, "skipped: %s (fine: %s)\n", line, x.why)
			return
		}
	}
	t.fail(nil, "unexpected skip: %s", line)
}

// lost gives the tests that failed in each package, by name, if nothing else did,
// all others were run, and they are not more than most.
func (t *tally) lost(most int) map[string][]string {
	tests, n := make(map[string][]string), 0
	for _, p := range t.problems {
		switch {
		case p.test == "" || !t.ended[p.pkg] || t.debris[p.pkg]:
			return nil
		case !slices.Contains(tests[p.pkg], p.test):
			tests[p.pkg] = append(tests[p.pkg], p.test)
			n++
		}
	}
	if n > most {
		return nil
	}
	return tests
}

// forgive counts the failed tests of a package as passed that have passed now.
func (t *tally) forgive(pkg string, passed []string) {
	t.problems = slices.DeleteFunc(t.problems, func(p problem) bool {
		if p.pkg != pkg || !slices.Contains(passed, p.test) {
			return false
		}
		t.flaky = append(t.flaky, p.what)
		t.failed--
		t.passed++
		return true
	})
}

// close prints the closing lines and says whether all is well.
func (t *tally) close() bool {
	for _, name := range t.flaky {
		fmt.Fprintf(t.out, "flaky: %s failed, and passed when it was run again\n", name)
	}
	for _, p := range t.problems {
		fmt.Fprintf(t.out, "failed: %s\n%s", p.what, p.output)
	}
	fmt.Fprintf(t.out, "%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped)
	return t.failed == 0 && t.passed > 0
}
