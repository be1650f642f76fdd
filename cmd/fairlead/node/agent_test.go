package node

import (
	"bytes"
	"context"
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

// The agent notifies systemd once that it is ready, regularly while it works, and when it stops.
func TestNotify(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	must(t, err)
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", filepath.Join(dir, "notify"))
	t.Setenv("WATCHDOG_USEC", "30000000")
	t.Setenv("WATCHDOG_PID", "")
	os.Unsetenv("WATCHDOG_PID")

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs bytes.Buffer
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, cli.Env{Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{
			"agent", "--config=", "--socket=" + filepath.Join(dir, "s"), "--self-socket=", "--metrics-addr=",
			"--state-dir=" + filepath.Join(dir, "state"), "--record-dir=" + filepath.Join(dir, "record"), "--policy-dir=" + filepath.Join(dir, "policy.d"),
			"--docker-host=unix:///nowhere", "--podman-host=unix:///nowhere", "--containerd=/nowhere",
		}})
	}()
	var told []string
	conn.SetReadDeadline(time.Now().Add(90 * time.Second))
	for !slices.Contains(told, "READY=1") || told[len(told)-1] != "WATCHDOG=1" {
		buf := make([]byte, 256)
		n, err := conn.Read(buf)
		if err != nil {
			cancel()
			t.Fatalf("%v; told %q; status %d: %s", err, told, <-done, &errs)
		}
		told = append(told, string(buf[:n]))
	}
	cancel()
	if status := <-done; status != cli.Done {
		t.Errorf("status %d: %s", status, &errs)
	}
	conn.SetReadDeadline(time.Now().Add(90 * time.Second))
	for !slices.Contains(told, "STOPPING=1") {
		buf := make([]byte, 256)
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("%v; told %q", err, told)
		}
		told = append(told, string(buf[:n]))
	}
	if n := strings.Count(strings.Join(told, " "), "READY=1"); n != 1 {
		t.Errorf("told of readiness %d times: %q", n, told)
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
		if got := beside(tc.socket, tc.name); got != tc.want {
			t.Errorf("beside %s, %q is %s, want %s", tc.socket, tc.name, got, tc.want)
		}
	}
}

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
