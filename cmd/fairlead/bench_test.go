package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestExperimentUsage(t *testing.T) {
	tests := []struct {
		args   string
		status int
		says   string
	}{
		{"bench", statusUsage, "the name of an experiment is missing"},
		{"bench pigeon", statusUsage, `unknown experiment "pigeon"`},
		{"bench netcpu extra", statusUsage, "takes no argument"},
		{"bench netcpu --rounds -1", statusUsage, "--rounds -1"},
		{"bench netcpu --mode pigeon", statusUsage, "isolate, charge or auto"},
		{"bench netcpu --only (", statusUsage, "--only"},
		{"bench netcpu --only pigeon", statusUsage, "no case has such a name"},
		{"bench netcpu --window -1s", statusUsage, "--window -1s"},
		{"bench netcpu -o csv", statusUsage, "table, json or yaml"},
		{"demo extra", statusUsage, "takes no argument"},
		{"demo --html /nowhere/page.html", statusFailed, "/nowhere/page.html"},
	}
	for _, tt := range tests {
		var stdout, stderr bytes.Buffer
		if tt.status == statusFailed && os.Geteuid() != 0 {
			tt.says = "needs root"
		}
		got := run(t.Context(), env{stdout: &stdout, stderr: &stderr, getenv: func(string) string { return "" }, args: strings.Fields(tt.args)})
		if got != tt.status || !strings.Contains(stderr.String(), tt.says) {
			t.Errorf("fairlead %s: status %d, %q", tt.args, got, &stderr)
		}
		if stdout.Len() > 0 {
			t.Errorf("fairlead %s prints %q", tt.args, &stdout)
		}
	}
}

func TestListCases(t *testing.T) {
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), env{stdout: &stdout, stderr: &stderr, getenv: func(string) string { return "" }, args: strings.Fields("bench netcpu --list --only ^udp-send")})
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	if status != 0 || len(lines) != 16 || lines[0] != "udp-send 2 500M" {
		t.Errorf("status %d, %q, %q", status, lines, &stderr)
	}
}

func TestProgress(t *testing.T) {
	var out bytes.Buffer
	say := progress(&out)
	for i := range 40 {
		say(i, 40, "thing")
	}
	if got := strings.Count(out.String(), "\n"); got != 10 || !strings.HasPrefix(out.String(), "[1/40] thing\n[5/40] thing\n") {
		t.Errorf("%d lines: %q", got, &out)
	}
	if terminal(&out) {
		t.Error("a buffer is a terminal")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if terminal(f) {
		t.Error("a file is a terminal")
	}
}
