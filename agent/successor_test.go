package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// precede is an agent with that state directory, until its input ends.
func precede(dir string) {
	j, err := journal.Open(dir)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("works")
	io.Copy(io.Discard, os.Stdin)
	if err := j.Close(); err != nil {
		os.Exit(1)
	}
}

// signal is a log that closes a channel with its first line.
type signal struct{ once func() }

func (s signal) Write(b []byte) (int, error) { s.once(); return len(b), nil }

// predecessor starts an agent that works. end ends it.
func predecessor(t *testing.T, dir string) (end func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"=precede "+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "works\n" {
		t.Fatalf("%q, %v", line, err)
	}
	end = sync.OnceFunc(func() { in.Close(); cmd.Wait() })
	t.Cleanup(end)
	return end
}

// crowd takes the name by which agents notice each other, and fills its backlog, as any container on
// the host's network can.
func crowd(t *testing.T, name string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	for {
		c, err := net.Dial("unix", name)
		if err != nil {
			return
		}
		t.Cleanup(func() { c.Close() })
	}
}

// nothing is what an agent without programs leaves.
func nothing() []qdisc.Left { return nil }

// TestSuccessorWaits ends the wait of an agent in each way, while a container has the name by which
// agents notice each other.
func TestSuccessorWaits(t *testing.T) {
	for i, tt := range []struct {
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
			cfg := Config{StateDir: t.TempDir(), Log: log, Roots: kernel.Default()}
			s, err := Succeed(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			s.name = fmt.Sprintf("@fairlead-test-%d-successor-%d", os.Getpid(), i)
			crowd(t, s.name)
			end := predecessor(t, cfg.StateDir)
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
				end()
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
	if err != nil {
		t.Fatal(err)
	}
	check(true)
	if !s.told() {
		t.Error("nobody was told to stop")
	}
	if _, err := Succeed(cfg); !errors.Is(err, ErrQueued) {
		t.Errorf("a second one: %v", err)
	}
	if err := untold(cfg.StateDir); err != nil || s.told() {
		t.Errorf("the next was told to stop before it began: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if a := <-got; !a.followed || a.err != nil {
		t.Errorf("with one that came: %+v", a)
	}
}
