package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The agent gives systemd signs of life while it works. It notifies it once, when every source has
// answered, that it is ready, and at last that it stops.
func TestNotify(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	address := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	conn, err := net.ListenUnixgram("unixgram", address)
	must(t, err)
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", address.Name)
	t.Setenv("WATCHDOG_USEC", "30000000")
	t.Setenv("WATCHDOG_PID", "")
	os.Unsetenv("WATCHDOG_PID")
	engine, err := net.Listen("unix", filepath.Join(dir, "engine")) // never answers
	must(t, err)
	defer engine.Close()

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs bytes.Buffer
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, cli.Env{Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{
			"agent", "--config=", "--socket=" + filepath.Join(dir, "s"), "--self-socket=", "--metrics-addr=",
			"--state-dir=" + filepath.Join(dir, "state"), "--record-dir=" + filepath.Join(dir, "record"), "--policy-dir=" + filepath.Join(dir, "policy.d"),
			"--docker-host=unix://" + engine.Addr().String(), "--podman-host=unix:///nowhere", "--containerd=/nowhere",
		}})
	}()
	var told []string
	until := func(word string, times int) {
		t.Helper()
		conn.SetReadDeadline(time.Now().Add(90 * time.Second))
		for times > 0 {
			buf := make([]byte, 256)
			n, err := conn.Read(buf)
			if err != nil {
				cancel()
				t.Fatalf("%v; told %q; status %d: %s", err, told, <-done, &errs)
			}
			if told = append(told, string(buf[:n])); told[len(told)-1] == word {
				times--
			}
		}
	}
	until("WATCHDOG=1", 3)
	if slices.Contains(told, "READY=1") {
		t.Errorf("ready before every source has answered: %q", told)
	}
	must(t, engine.Close())
	until("READY=1", 1)
	until("WATCHDOG=1", 1)
	cancel()
	status := <-done
	if status != cli.Done {
		t.Errorf("status %d: %s", status, &errs)
	}
	_, err = conn.WriteToUnix([]byte("the end"), address)
	must(t, err)
	until("the end", 1)
	if all := strings.Join(told, " "); strings.Count(all, "READY=1") != 1 || strings.Count(all, "STOPPING=1") != 1 || !strings.HasSuffix(all, " STOPPING=1 the end") {
		t.Errorf("told in all %q", told)
	}
}

func TestBeside(t *testing.T) {
	for _, tc := range []struct{ socket, name, want string }{
		{"/run/fairlead/fairlead.sock", "self.sock", "/run/fairlead/self.sock"},
		{"/run/second/fairlead.sock", "self.sock", "/run/second/self.sock"}, // two agents do not meet
		{"s.sock", "self.sock", "self.sock"},
		{"/run/second/fairlead.sock", "/run/fairlead-self/self.sock", "/run/fairlead-self/self.sock"},
		{"/run/fairlead/fairlead.sock", "", ""},
	} {
		testkit.Same(t, fmt.Sprintf("beside %s, %q", tc.socket, tc.name), tc.want, beside(tc.socket, tc.name))
	}
}

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }

func TestHealth(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	says := func(what string, want int, text string) {
		t.Helper()
		var out, errs bytes.Buffer
		got := run(t.Context(), cli.Env{Stdout: &out, Stderr: &errs, Getenv: os.Getenv, Args: []string{"health", what, "--config=", "--health-dir=" + dir}})
		if got != want || !strings.Contains(errs.String(), text) {
			t.Errorf("health %s: status %d, %s%s; want %d and %q", what, got, &out, &errs, want, text)
		}
	}
	says("alive", cli.Failed, "no sign of life")
	says("ready", cli.Failed, "not ready")

	h, err := openHealth(dir)
	must(t, err)
	says("alive", cli.Done, "")
	says("ready", cli.Failed, "not ready")
	waited := h.waiting(log)
	says("ready", cli.Done, "")
	waited()
	says("ready", cli.Failed, "not ready")
	h.ready(log, true)
	says("ready", cli.Done, "")

	// A sign of life of this boot's first second.
	must(t, os.WriteFile(filepath.Join(dir, aliveFile), []byte("1"), 0o644))
	says("alive", cli.Failed, "no sign of life for")
	must(t, testkit.Err(openHealth(dir)))
	says("alive", cli.Done, "")
	says("ready", cli.Failed, "not ready") // the container was started again

	if h, err := openHealth(""); h != nil || err != nil {
		t.Errorf("without a directory: %v, %v", h, err)
	}
}

// An agent that waits gives a sign of life each second, and none once it has waited: those are the
// working agent's then.
func TestHealthBeats(t *testing.T) {
	dir := t.TempDir()
	silence := func() {
		must(t, os.WriteFile(filepath.Join(dir, aliveFile), []byte("1"), 0o644))
	}
	beats := func() bool {
		synctest.Wait()
		text, err := os.ReadFile(filepath.Join(dir, aliveFile))
		return err == nil && string(text) != "1"
	}
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		h, err := openHealth(dir)
		must(t, err)
		waited := h.waiting(slog.New(slog.NewTextHandler(&log, nil)))
		for second := range 3 {
			silence()
			if time.Sleep(999 * time.Millisecond); beats() {
				t.Errorf("a sign of life before second %d", second+1)
			}
			if time.Sleep(time.Millisecond); !beats() {
				t.Errorf("no sign of life in second %d", second+1)
			}
		}
		waited()
		silence()
		if time.Sleep(time.Minute); beats() {
			t.Error("a sign of life after the wait")
		}

		must(t, os.RemoveAll(dir))
		if h.alive(slog.New(slog.NewTextHandler(&log, nil))); !strings.Contains(log.String(), "show health") {
			t.Errorf("without its directory the log is %q", &log)
		}
	})
}
