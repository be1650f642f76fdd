package node

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

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
