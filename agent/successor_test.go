package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// signal is a log that closes a channel with its first line.
type signal struct{ once func() }

func (s signal) Write(b []byte) (int, error) { s.once(); return len(b), nil }

// nothing is what an agent without programs leaves.
func nothing() []qdisc.Left { return nil }

// TestSuccessorWaits ends the wait of an agent in each way.
func TestSuccessorWaits(t *testing.T) {
	for _, tt := range []struct {
		name         string
		told, cancel bool // the agent that works; this one
		want         error
	}{
		{"the other ends", false, false, nil},
		{"this one is stopped", false, true, context.Canceled},
		{"both are stopped", true, true, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			waits := make(chan struct{})
			log := slog.New(slog.NewTextHandler(signal{sync.OnceFunc(func() { close(waits) })}, nil))
			cfg := Config{StateDir: t.TempDir(), Log: log, Roots: kernel.Roots{Proc: fakeProc(t)}}
			s, err := Succeed(cfg)
			testkit.Must(t, err)
			defer s.Close()
			first, err := alone(cfg.Roots.Proc)
			testkit.Must(t, err)
			defer first.Close()
			if tt.told {
				if followed, err := succeeded(t.Context(), cfg.StateDir, 0, nothing); !followed || err != nil {
					t.Fatalf("nobody waits: %v, %v", followed, err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- s.Wait(ctx) }()
			select {
			case err := <-done:
				t.Fatalf("it did not wait: %v", err)
			case <-waits:
			}
			if tt.cancel {
				cancel()
			}
			if tt.want == nil {
				first.Close()
			}
			if err := <-done; !errors.Is(err, tt.want) {
				t.Errorf("%v, want %v", err, tt.want)
			}
			// Whoever stops next sees that nobody waits any more. Of both that are stopped, this one may
			// have seen the other's end first: then it is still in its place.
			if tt.want != nil {
				if got, err := succeeded(t.Context(), cfg.StateDir, 0, nothing); got || err != nil {
					t.Errorf("somebody still waits: %v, %v", got, err)
				}
			}
		})
	}
}

func TestSucceeded(t *testing.T) {
	cfg := Config{StateDir: t.TempDir(), Log: quiet()}
	check := func(want bool) {
		t.Helper()
		if got, err := succeeded(t.Context(), cfg.StateDir, 0, nothing); got != want || err != nil {
			t.Errorf("succeeded: %v, %v; want %v", got, err, want)
		}
	}
	check(false)
	s, err := Succeed(cfg)
	testkit.Must(t, err)
	check(true)
	if !s.told() {
		t.Error("nobody was told to stop")
	}
	testkit.Is(t, "a second one", testkit.Err(Succeed(cfg)), errQueued)
	if err := untold(cfg.StateDir); err != nil || s.told() {
		t.Errorf("the next was told to stop before it began: %v", err)
	}
	testkit.Must(t, s.Close())
	check(false)
}

// TestSucceededLate has the next agent come after the one that works was told to stop.
func TestSucceededLate(t *testing.T) {
	cfg := Config{StateDir: t.TempDir(), Log: quiet()}
	type answer struct {
		followed bool
		err      error
	}
	stop := func(ctx context.Context) <-chan answer {
		got := make(chan answer, 1)
		go func() {
			followed, err := succeeded(ctx, cfg.StateDir, time.Hour, nothing)
			got <- answer{followed, err}
		}()
		return got
	}
	ctx, cancel := context.WithCancel(t.Context())
	got := stop(ctx)
	cancel()
	if a := <-got; a.followed || a.err != nil {
		t.Errorf("with nobody there: %+v", a)
	}
	got = stop(t.Context())
	s, err := Succeed(cfg)
	testkit.Must(t, err)
	defer s.Close()
	if a := <-got; !a.followed || a.err != nil {
		t.Errorf("with one that came: %+v", a)
	}
}

// fakeProc is what the kernel says of this process, as process 42 of a host of its own.
func fakeProc(t *testing.T) (proc string) {
	t.Helper()
	proc = t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(proc, "1/root"), 0o700), os.MkdirAll(filepath.Join(proc, "42/ns"), 0o700),
		os.Symlink("/proc/self/ns/net", filepath.Join(proc, "42/ns/net")), os.Symlink("42", filepath.Join(proc, "self"))); err != nil {
		t.Fatal(err)
	}
	return proc
}

func TestAlone(t *testing.T) {
	proc := fakeProc(t)
	first, err := alone(proc)
	testkit.Must(t, err)
	if _, err := alone(proc); !errors.Is(err, ErrTwo) || !strings.Contains(err.Error(), "process 42") {
		t.Errorf("a second agent: %v", err)
	}
	other, err := alone(fakeProc(t)) // of another host
	testkit.Must(t, err)
	other.Close()
	elsewhere := filepath.Join(proc, "42/ns/net")
	testkit.Must(t, errors.Join(os.Remove(elsewhere), os.Symlink("/proc/self/ns/mnt", elsewhere)))
	if other, err = alone(proc); err != nil {
		t.Fatalf("in another namespace: %v", err)
	}
	other.Close()
	testkit.Must(t, errors.Join(os.Remove(elsewhere), os.Symlink("/proc/self/ns/net", elsewhere), first.Close()))
	again, err := alone(proc)
	if err != nil {
		t.Fatalf("after the end of the first: %v", err)
	}
	again.Close()
}

// What a killed agent has changed is undone although its state directory was removed, unless the
// agent lives: its copy is locked.
func TestRestoreAlone(t *testing.T) {
	proc, dir, group := fakeProc(t), t.TempDir(), filepath.Join(t.TempDir(), "fairlead")
	cfg := Config{Roots: kernel.Roots{Proc: proc, Cgroup: filepath.Dir(group)}, StateDir: filepath.Join(dir, "state"), Log: quiet()}
	j, err := openJournal(cfg)
	testkit.Must(t, err)
	testkit.Must(t, j.Turn(cgroup.Group(group), cgroup.Present, journal.Owner{Feature: "netcpu"}))
	testkit.Must(t, os.RemoveAll(cfg.StateDir))
	if out, err := RestoreAlone(cfg, nil); err != nil || len(out) != 0 {
		t.Errorf("beside the agent: %+v, %v", out, err)
	}
	testkit.Must(t, j.Close())
	testkit.Must(t, os.RemoveAll(cfg.StateDir))
	if out, err := RestoreAlone(cfg, nil); err != nil || len(out) != 1 || out[0].Result != journal.Restored {
		t.Errorf("alone: %+v, %v", out, err)
	}
	testkit.Is(t, "the group is still there", testkit.Err(os.Stat(group)), os.ErrNotExist)
	if left, err := filepath.Glob(filepath.Join(proc, "1/root/run/fairlead/%*")); err != nil || len(left) > 0 {
		t.Errorf("copies are left: %q, %v", left, err)
	}
}
