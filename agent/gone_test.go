package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// TestGoneIsNoNews has devices that are taken down under the feature.
func TestGoneIsNoNews(t *testing.T) {
	for _, c := range []struct {
		err    error
		lasts  time.Duration
		warned int
	}{
		{fmt.Errorf("read gro: %w", journal.ErrGone), passing, 0},
		{fmt.Errorf("link 7: %w", netdev.ErrNoLink), passing, 0},
		{fmt.Errorf("read gro: %w", journal.ErrGone), time.Minute, 1}, // it does not pass
		{&fs.PathError{Op: "open", Path: "tasks", Err: unix.ENOENT}, passing, 0},
		{errors.Join(journal.ErrGone, errFake), passing, 1},
		{fmt.Errorf("traffic: %w: container 2", feature.ErrDisagree), passing, 0},
		{fmt.Errorf("traffic: %w: container 2", feature.ErrDisagree), time.Minute, 1},
		{errFake, time.Millisecond, 1},
		{errFake, time.Minute, 1},
	} {
		var log bytes.Buffer
		clock, f := newClock(), newFake()
		f.apply = func(context.Context, policy.Target) error { return c.err }
		w := newWorker(f, clock.pace(), slog.New(slog.NewTextHandler(&log, nil)), func() {})
		w.want(targets(target(1, "isolate")), false)
		for end := clock.Now().Add(c.lasts); clock.Now().Before(end); clock.Advance(20 * time.Millisecond) {
			// Another container in its namespace has ended: it is due at once.
			w.rows[1].due = clock.Now()
			if did, _ := w.step(t.Context()); !did {
				t.Fatal("nothing was due")
			}
		}
		if n := strings.Count(log.String(), "not in force"); n != c.warned {
			t.Errorf("%v, for %v: %d warnings, want %d\n%s", c.err, c.lasts, n, c.warned, &log)
		}
	}
}
