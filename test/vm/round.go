package vm

import (
	"context"
	"errors"
	"os"
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
// takes longest, and the rest fills up what time is left beside the last.
func RunAll(ctx context.Context, rounds []*Round, atOnce int) {
	rounds = slices.Clone(rounds)
	slices.SortStableFunc(rounds, func(a, b *Round) int { return strings.Compare(a.Name, b.Name) })
	next := make(chan *Round)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for r := range next {
				began := time.Now()
				r.result, r.err = r.run(ctx)
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

func (r *Round) run(ctx context.Context) (Result, error) {
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return Result{}, err
	}
	image, err := os.Create(filepath.Join(r.dir, "initramfs"))
	if err != nil {
		return Result{}, err
	}
	defer os.Remove(image.Name()) // a hundred megabytes
	if err := errors.Join(r.Root.Write(image), image.Close()); err != nil {
		return Result{}, err
	}
	return Boot(ctx, r.Root.Kernel, image.Name(), r.dir, r.limit)
}
