package main

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// screenOf returns the output of a verb on a terminal of a given width.
func screenOf(t *testing.T, columns uint16, s serve.Backend, args ...string) []string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := serve.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	go serve.Serve(t.Context(), l, s, slog.New(slog.DiscardHandler))
	lines := make(chan []string)
	go func() {
		var got []string
		for in := bufio.NewScanner(master); in.Scan(); { // it ends with the terminal
			got = append(got, strings.TrimRight(in.Text(), "\r"))
		}
		lines <- got
	}()
	status := run(t.Context(), cli.Env{Stdout: tty, Stderr: tty, Getenv: func(string) string { return "" }, Args: append(args, "--socket", socket)})
	tty.Close()
	got := <-lines
	if status != cli.Done {
		t.Fatalf("status %d: %q", status, got)
	}
	return got
}

// A table takes the width of the terminal: names are cut where there is no room, and only there.
func TestTerminalWidth(t *testing.T) {
	s := example()
	const long, image = "payment-service-of-the-shop-in-production-1", "registry.example.com/team/nginx:1.27"
	s.list[0].Name = long
	for columns, whole := range map[uint16]bool{60: false, 80: false, 130: true} {
		lines := screenOf(t, columns, s, "ps")
		text := strings.Join(lines, "\n")
		if strings.Contains(text, long) != whole || strings.Contains(text, image) != whole {
			t.Errorf("%d columns:\n%s", columns, text)
		}
		for _, line := range lines {
			if n := utf8.RuneCountInString(line); n > int(columns) {
				t.Errorf("%d columns: a line of %d: %s", columns, n, line)
			}
		}
	}
	// So do the other tables.
	for columns, whole := range map[uint16]bool{80: false, 130: true} {
		lines := screenOf(t, columns, &latencyStub{report: latencyReport()}, "latency", "--interval", "100ms")
		if got := strings.Contains(strings.Join(lines, "\n"), "web-1-of-a-deployment-with-a-long-name"); got != whole {
			t.Errorf("latency, %d columns:\n%s", columns, strings.Join(lines, "\n"))
		}
	}
}
