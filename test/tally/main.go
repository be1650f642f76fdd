// Command tally runs go test and keeps the books: it prints go test's own
// closing line for each package, the output of what failed and the reason of
// each skip, and at the end the failures once more and one line "N passed, N
// failed, N skipped", subtests included. A skip that is not in the list of expected ones is a failure.
//
//	tally [-skips FILE] [-again N] GO-TEST-ARGUMENTS [-- GO-TEST-ARGUMENTS]...
//
// With -again, up to N tests that failed are run once more when all others are
// done. One that passes then counts as passed, and is named before the closing
// line: a test may fail because the machine stood still, but what is wrong fails
// twice. Tests of test/vm are not, which does this itself, guest by guest.
//
// It is not a test framework: the Makefile calls it, and go test works without.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

func main() {
	skips := flag.String("skips", "", "file of expected skips")
	module := flag.String("module", "github.com/fairlead-project/fairlead", "prefix of package paths to leave out")
	again := flag.Int("again", 0, "run up to so many failed tests once more")
	flag.Parse()
	ok, err := run(*skips, *module, *again, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "tally:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run tallies one go test for each group of arguments.
func run(skips, module string, again int, args []string) (ok bool, err error) {
	var expected []expectation
	if skips != "" {
		data, err := os.ReadFile(skips)
		if err != nil {
			return false, err
		}
		if expected, err = parseSkips(skips, string(data)); err != nil {
			return false, err
		}
	}
	t := newTally(os.Stdout, module, expected)
	for len(args) > 0 {
		group := args
		if i := slices.Index(args, "--"); i >= 0 {
			group, args = args[:i], args[i+1:]
		} else {
			args = nil
		}
		if err := t.goTest(group); err != nil {
			return false, err
		}
	}
	for pkg, tests := range t.lost(again) {
		if strings.HasSuffix(pkg, "/test/vm") {
			continue
		}
		second := newTally(os.Stdout, module, expected)
		if err := second.goTest([]string{"-count=1", "-timeout", "20m", "-run", "^(" + strings.Join(tests, "|") + ")$", pkg}); err != nil {
			return false, err
		}
		if second.failed == 0 {
			t.forgive(pkg, second.good[pkg])
		}
	}
	return t.close(), nil
}

// goTest runs one go test and counts its results. That it exits non-zero says
// nothing new if a failure was counted, and is a failure itself otherwise.
func (t *tally) goTest(args []string) error {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	before := t.failed
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := t.read(out); err != nil {
		return fmt.Errorf("read from go test: %w", err)
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if t.failed == before {
			t.fail(nil, "go test: %v", exit)
		}
		return nil
	}
	return err
}
