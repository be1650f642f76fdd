// Command tally runs go test and keeps the books: it prints go test's own
// closing line for each package, the output of what failed and the reason of
// each skip, and at the end the failures once more and one line "N passed, N
// failed, N skipped", subtests included. A skip that is not in the list of expected ones is a failure.
//
//	tally [-skips FILE] GO-TEST-ARGUMENTS [-- GO-TEST-ARGUMENTS]...
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
)

func main() {
	skips := flag.String("skips", "", "file of expected skips")
	module := flag.String("module", "github.com/fairlead-project/fairlead", "prefix of package paths to leave out")
	flag.Parse()
	ok, err := run(*skips, *module, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "tally:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run tallies one go test for each group of arguments.
func run(skips, module string, args []string) (ok bool, err error) {
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
