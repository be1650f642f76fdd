package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// rest is the name of what runs in a guest that packages share.
const rest = "rest"

// Round is one guest, and what came out of it.
type Round struct {
	Kernel Kernel
	Name   string // of what it runs: "feature/traffic", or rest
	Root   Root

	dir   string
	limit time.Duration
	done  chan struct{} // closed when what follows is there

	result Result
	took   time.Duration
	err    error

	again    Result // of what failed in the first
	againErr error
}

// Rounds divides the tests on one kernel among guests, so that they can run at
// once: one for each package that is below feature, which are the long ones, and
// one for all others. What they need lies in dir, a guest's own things below it.
func Rounds(k Kernel, dir string, root Root, limit time.Duration) []*Round {
	tests := map[string][]Test{}
	for _, t := range root.Tests {
		name := rest
		if k.TooOld && !strings.HasPrefix(t.Package, "test/") {
			continue
		}
		if strings.HasPrefix(t.Package, "feature/") {
			name = t.Package
		}
		tests[name] = append(tests[name], t)
	}
	var rounds []*Round
	for name, tests := range tests {
		r := &Round{Kernel: k, Name: name, Root: root, dir: filepath.Join(dir, strings.ReplaceAll(name, "/", "_")),
			limit: limit, done: make(chan struct{})}
		r.Root.Tests = tests
		rounds = append(rounds, r)
	}
	slices.SortFunc(rounds, func(a, b *Round) int { return strings.Compare(a.Name, b.Name) })
	return rounds
}

// RunAll boots the guests, so many at once, in the order of their names: netcpu
// takes longest, first of all on the newest kernel, which is given last and skips
// the least; and the rest fills up what time is left beside the last.
func RunAll(ctx context.Context, rounds []*Round, atOnce int) {
	rounds = slices.Clone(rounds)
	slices.Reverse(rounds)
	slices.SortStableFunc(rounds, func(a, b *Round) int { return strings.Compare(a.Name, b.Name) })
	next := make(chan *Round)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for r := range next {
				began := time.Now()
				r.err = r.run(ctx)
				r.took = time.Since(began)
				close(r.done)
			}
		})
	}
	for _, r := range rounds {
		next <- r
	}
	close(next)
	wg.Wait()
}

// run boots a guest for all tests, and another one for those that fail.
func (r *Round) run(ctx context.Context) (err error) {
	if r.result, err = r.boot(ctx, r.Root, r.dir); err != nil {
		return err
	}
	root, err := r.Root.failed(r.result)
	if err != nil || len(root.Tests) == 0 {
		return err
	}
	r.again, r.againErr = r.boot(ctx, root, filepath.Join(r.dir, "again"))
	return nil
}

// most is how many tests of a guest are run again if they fail. Where it is
// more, something is wrong.
const most = 5

// failed gives what runs the tests again that failed in a guest, and nothing
// else: none if they are more than most. An emulated CPU stands still now and
// then, for as long as the machine has something else to do, and a test that
// watches what happens in a time may fail for that. What is wrong fails twice.
func (r Root) failed(first Result) (Root, error) {
	tests, names := r.Tests, []string(nil)
	r.Tests = nil
	for _, t := range tests {
		run := first.Runs[t.name()]
		if !run.ended() {
			continue
		}
		outcomes, _, err := run.outcomes()
		if err != nil {
			return Root{}, err
		}
		was := len(names)
		for _, o := range outcomes {
			if o.action == "fail" && !strings.Contains(o.test, "/") {
				names = append(names, o.test)
			}
		}
		if len(names) > was {
			r.Tests = append(r.Tests, t)
		}
	}
	if len(names) > most {
		return Root{}, nil
	}
	r.Run = "^(" + strings.Join(names, "|") + ")$"
	return r, nil
}

func (r *Round) boot(ctx context.Context, root Root, dir string) (Result, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Result{}, err
	}
	image, err := os.Create(filepath.Join(dir, "initramfs"))
	if err != nil {
		return Result{}, err
	}
	defer os.Remove(image.Name()) // a hundred megabytes
	if err := errors.Join(root.Write(image), image.Close()); err != nil {
		return Result{}, err
	}
	return Boot(ctx, root.Kernel, image.Name(), dir, r.limit)
}

// outcome is how a test ended, and what it printed.
type outcome struct{ test, action, output string }

// outcomes gives the tests of a run that ended, in the order in which they did,
// and what was printed beside them.
func (r Run) outcomes() (ended []outcome, rest string, err error) {
	cmd := exec.Command("go", "tool", "test2json")
	cmd.Stdin = bytes.NewReader(r.Output)
	out, err := cmd.Output()
	if err != nil {
		return nil, "", fmt.Errorf("go tool test2json: %w", err)
	}
	output := make(map[string]string)
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var e struct{ Action, Test, Output string }
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, "", fmt.Errorf("output of go tool test2json: %w", err)
		}
		switch {
		case e.Action == "output":
			output[e.Test] += e.Output
		case e.Test != "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
			ended = append(ended, outcome{e.Test, e.Action, output[e.Test]})
			delete(output, e.Test)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(output)) {
		rest += output[name]
	}
	return ended, rest, nil
}

// ended says whether all tests were run and some failed, and nothing else went
// wrong: 2 is the status of a panic, 124 that of a time that is over.
func (r Run) ended() bool {
	return r.Status == "1" && !bytes.Contains(r.Output, []byte("these are left after the tests")) // see testkit.Run
}

// passes says whether a test, or the one that it is a part of, passed in a run.
func (r Run) passes(test string) bool {
	top, _, _ := strings.Cut(test, "/")
	ended, _, err := r.outcomes()
	return err == nil && r.Status == "0" && slices.ContainsFunc(ended, func(o outcome) bool {
		return o.test == top && o.action == "pass"
	})
}
