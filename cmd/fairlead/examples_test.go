package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

const examples = "../../examples"

// Each policy file is valid by itself, and all are valid as one directory.
func TestExamplesPolicy(t *testing.T) {
	dir := filepath.Join(examples, "policy.d")
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	for _, file := range append(files, dir) {
		if status := run(t.Context(), cli.Env{Stdout: t.Output(), Stderr: t.Output(), Getenv: os.Getenv, Args: []string{"policy", "check", file}}); status != cli.Done {
			t.Errorf("%s is not good", file)
		}
	}
}

// Each service in the Compose file has labels, and all of them count.
func TestExamplesCompose(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(examples, "compose.yaml"))
	must(t, err)
	var compose struct {
		Services map[string]struct{ Labels map[string]string }
	}
	must(t, yaml.Unmarshal(data, &compose))
	var containers []container.Container
	for name, s := range compose.Services {
		containers = append(containers, container.Container{ID: container.ID(len(containers) + 1), Name: name, Labels: s.Labels})
	}
	if len(containers) == 0 {
		t.Fatal("the Compose file has no services")
	}
	targets, problems := new(policy.Policy).Resolve(containers)
	for _, p := range problems {
		t.Errorf("%s: %v", p.Name, p)
	}
	for _, target := range targets {
		if n := len(target.Container.Labels); n == 0 || len(target.Origins) != n {
			t.Errorf("%s: %d labels set %d keys: %v", target.Container.Name, n, len(target.Origins), target.Origins)
		}
	}
}

// The drop-in replaces the unit's command by one with flags that the agent has.
func TestExamplesDropIn(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(examples, "fairlead.service.d/override.conf"))
	must(t, err)
	unit, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	values := map[string][]string{}
	for line := range strings.Lines(string(data)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || strings.HasPrefix(key, "#") {
			continue
		}
		values[key] = append(values[key], value)
		if !bytes.Contains(unit, fmt.Appendf(nil, "\n%s=", key)) {
			t.Errorf("the unit has no %s= that the drop-in could change", key)
		}
	}
	commands := values["ExecStart"]
	if len(commands) != 2 || commands[0] != "" || !bytes.Contains(unit, []byte("\nExecStart=/usr/bin/fairlead agent\n")) {
		t.Fatalf("ExecStart= is %q, want an empty line and a command in place of the unit's", commands)
	}
	args, ok := strings.CutPrefix(commands[1], "/usr/bin/fairlead agent ")
	if !ok {
		t.Fatalf("%q does not start the agent", commands[1])
	}
	_, flags := verb.NewAgentFlags(env(cli.Env{Getenv: os.Getenv}))
	must(t, flags.Parse(strings.Fields(args)))
}
