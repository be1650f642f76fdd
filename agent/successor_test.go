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

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
)

// precede is an agent of that name, until its input ends.
func precede(name string) {
	if _, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name}); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("works")
	io.Copy(io.Discard, os.Stdin)
}

// signal is a log that closes a channel with its first line.
type signal struct{ once func() }

func (s signal) Write(b []byte) (int, error) { s.once(); return len(b), nil }

// predecessor starts an agent that works. end ends it.
func predecessor(t *testing.T, name string) (pid int, end func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"=precede "+name)
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
	return cmd.Process.Pid, end
}

// TestSuccessorWaits ends the wait of an agent in each way.
func TestSuccessorWaits(t *testing.T) {
	testkit.NeedRoot(t) // else nobody takes the other for an agent
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
			pid, end := predecessor(t, s.name)
			if tt.told {
				if _, err := s.file.WriteAt(fmt.Appendf(nil, "%-10d\n", pid), 0); err != nil {
					t.Fatal(err)
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
				if got, err := Succeeded(cfg); got || err != nil {
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
		if got, err := Succeeded(cfg); got != want || err != nil {
			t.Errorf("succeeded: %v, %v; want %v", got, err, want)
		}
	}
	check(false)
	s, err := Succeed(cfg)
	if err != nil {
		t.Fatal(err)
	}
	check(true)
	if s.told() != os.Getpid() {
		t.Errorf("told to stop was %d", s.told())
	}
	if _, err := Succeed(cfg); !errors.Is(err, ErrQueued) {
		t.Errorf("a second one: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	check(false)
}
