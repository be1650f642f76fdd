package main

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// memory is a knob of a kind that no Opener opens.
type memory struct{ name, value string }

func (m *memory) Ref() journal.Ref      { return journal.Ref{Kind: "memory", Object: m.name} }
func (m *memory) Read() (string, error) { return m.value, nil }
func (m *memory) Write(v string) error  { m.value = v; return nil }

// TestRestoreExpired checks which entries are tried.
func TestRestoreExpired(t *testing.T) {
	dir := t.TempDir()
	j, err := journal.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, expiry := range map[string]time.Time{"past": time.Now().Add(-time.Hour), "future": time.Now().Add(time.Hour), "never": {}} {
		if err := j.TurnUntil(&memory{name, "before"}, "after", journal.Owner{Feature: "f", Container: 7}, expiry); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	f := &agentFlags{cfg: agent.Config{Roots: kernel.Default(), StateDir: dir, Socket: filepath.Join(dir, "nobody")}}
	for _, c := range []struct {
		ref     string
		expired bool
		tried   int
	}{{"", true, 1}, {"7", true, 1}, {"8", true, 0}, {"", false, 3}} {
		done, err := restore(t.Context(), f, c.ref, c.expired)
		if err != nil {
			t.Fatal(err)
		}
		if len(done.Outcomes) != c.tried || c.tried == 1 && done.Outcomes[0].Object != "past" {
			t.Errorf("%+v: %+v", c, done.Outcomes)
		}
	}
}
