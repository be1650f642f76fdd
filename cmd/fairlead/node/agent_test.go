package node

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
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
