package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/bench"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func TestExperimentUsage(t *testing.T) {
	tests := []struct {
		args   string
		status int
		says   string
	}{
		{"bench", cli.Usage, "the name of an experiment is missing"},
		{"bench pigeon", cli.Usage, `unknown experiment "pigeon"`},
		{"bench netcp", cli.Usage, `unknown experiment "netcp"; did you mean netcpu?`},
		{"pigeon", cli.Usage, `unknown command "pigeon"`},
		{"bench netcpu extra", cli.Usage, "takes no argument"},
		{"bench netcpu --rounds -1", cli.Usage, "--rounds -1"},
		{"bench netcpu --mode pigeon", cli.Usage, "isolate, charge or auto"},
		{"bench netcpu --only (", cli.Usage, "--only"},
		{"bench netcpu --only pigeon", cli.Usage, "no case has such a name"},
		{"bench netcpu --window -1s", cli.Usage, "--window -1s"},
		{"bench netcpu --rounds x", cli.Usage, `--rounds "x": want a whole number`},
		{"bench netcpu --window 5", cli.Usage, `--window "5": want a time`},
		{"bench netcpu -o csv", cli.Usage, "table, json or yaml"},
		{"demo extra", cli.Usage, "takes no argument"},
	}
	for _, tt := range tests {
		var stdout, stderr bytes.Buffer
		got := run(t.Context(), cli.Env{Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }, Args: strings.Fields(tt.args)}, bench.Experiments())
		if got != tt.status || !strings.Contains(stderr.String(), tt.says) {
			t.Errorf("fairlead-lab %s: status %d, %q", tt.args, got, &stderr)
		}
		if stdout.Len() > 0 {
			t.Errorf("fairlead-lab %s prints %q", tt.args, &stdout)
		}
	}
}

func TestListCases(t *testing.T) {
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), cli.Env{Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }, Args: strings.Fields("bench netcpu --list --only ^udp-send")}, bench.Experiments())
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
}
