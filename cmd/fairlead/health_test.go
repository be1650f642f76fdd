package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
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
	says("well", cli.Usage, "ready or alive")

	h, err := openHealth(dir)
	if err != nil {
		t.Fatal(err)
	}
	says("alive", cli.Done, "")
	says("ready", cli.Failed, "not ready")
	waited := h.waiting(log)
	says("ready", cli.Done, "")
	waited()
	says("ready", cli.Failed, "not ready")
	h.ready(log, true)
	says("ready", cli.Done, "")

	// A sign of life of this boot's first second.
	if err := os.WriteFile(filepath.Join(dir, aliveFile), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	says("alive", cli.Failed, "no sign of life for")
	if _, err := openHealth(dir); err != nil {
		t.Fatal(err)
	}
	says("alive", cli.Done, "")
	says("ready", cli.Failed, "not ready") // the container was started again

	if h, err := openHealth(""); h != nil || err != nil {
		t.Errorf("without a directory: %v, %v", h, err)
	}
}
