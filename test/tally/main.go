// Command tally runs go test and counts the results: it prints go test's own closing line for each
// package, the output of failed tests and the reason of each skip. At the end it prints the slowest
// tests, the failures once more and one line "N passed, N failed, N skipped", subtests included. A
// test that fails once is a failure.
//
//	tally [-lists DIR] [-limit TIME] [-scope TEXT] GO-TEST-ARGUMENTS [-- GO-TEST-ARGUMENTS]...
//
// The groups of arguments run one after another. A group that begins with "+" runs beside the
// following groups. NAME=VALUE before the arguments of a group goes to its environment.
//
// DIR holds the expectations: expected-skips.txt (any other skip is a failure) and bounds.txt (how
// long a package should take). When TIME is over, or on a signal, tally ends, names and counts as
// failed whatever still runs. TEXT states, before the closing line, what the run leaves out.
//
// Only one run at a time may change a machine: the Makefile has a second wait for the first. tally
// first removes what killed runs left behind.
//
// It is not a test framework: the Makefile calls it, and go test works without it.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func main() {
	lists := flag.String("lists", "", "folder with the lists of expected skips and bounds")
	module := flag.String("module", "github.com/fairlead-project/fairlead", "prefix of package paths to leave out")
	limit := flag.Duration("limit", time.Hour, "end what still runs after so long")
	scope := flag.String("scope", "", "what the run leaves out")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, *limit)
	defer cancel()
	var known knowledge
	if *lists != "" {
		var err error
		if known, err = readLists(*lists); err != nil {
			fmt.Fprintln(os.Stderr, "tally:", err)
			os.Exit(1)
		}
	}
	for _, what := range testkit.Sweep() {
		fmt.Println("left by a run that was killed, removed:", what)
	}
	restore, err := ungrouped(autogroup)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tally:", err)
		os.Exit(1)
	}
	t := newTally(os.Stdout, *module, known)
	err = errors.Join(t.run(ctx, flag.Args()), restore())
	if err != nil {
		fmt.Fprintln(os.Stderr, "tally:", err)
	}
	if *scope != "" {
		fmt.Println(*scope)
	}
	if ok := t.close(); !ok || err != nil {
		os.Exit(1)
	}
}

// run tallies one go test for each group of arguments.
func (t *tally) run(ctx context.Context, args []string) error {
	var beside sync.WaitGroup
	var errs []error
	for len(args) > 0 && ctx.Err() == nil {
		group := args
		if i := slices.Index(args, "--"); i >= 0 {
			group, args = args[:i], args[i+1:]
		} else {
			args = nil
		}
		if len(group) > 0 && group[0] == "+" {
			i := len(errs)
			errs = append(errs, nil)
			beside.Go(func() { errs[i] = t.goTest(ctx, group[1:]) })
		} else if err := t.goTest(ctx, group); err != nil {
			errs = append(errs, err)
			break
		}
	}
	beside.Wait()
	if err := ctx.Err(); err != nil {
		t.unfinished(errors.Is(err, context.DeadlineExceeded))
	}
	return errors.Join(errs...)
}

// goTest runs one go test and counts its results. A non-zero exit counts as a failure unless
// another failure was counted.
func (t *tally) goTest(ctx context.Context, args []string) error {
	var env []string
	for len(args) > 0 && !strings.HasPrefix(args[0], "-") && strings.Contains(args[0], "=") {
		env, args = append(env, args[0]), args[1:]
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	// The tests are children of go's processes, and all of them have to end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	wrong, err := t.read(out)
	if err != nil {
		return fmt.Errorf("read from go test: %w", err)
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if !wrong && ctx.Err() == nil {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.fail(nil, "go test: %v", exit)
		}
		return nil
	}
	return err
}

// read parses the output of one go test -json until its end, and reports whether anything failed.
// It passes on lines other than events unchanged.
func (t *tally) read(r io.Reader) (wrong bool, err error) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			wrong = t.line(line) || wrong
		}
		if err == io.EOF {
			return wrong, nil
		}
		if err != nil {
			return wrong, err
		}
	}
}
