package containers

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/internal/testkit"
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
	j, err := journal.Open(dir, "")
	testkit.Must(t, err)
	for name, expiry := range map[string]time.Time{"past": time.Now().Add(-time.Hour), "future": time.Now().Add(time.Hour), "never": {}} {
		testkit.Must(t, j.TurnUntil(&memory{name, "before"}, "after", journal.Owner{Feature: "f", Container: 7}, expiry))
	}
	testkit.Must(t, j.Close())
	f := &verb.AgentFlags{Cfg: agent.Config{Roots: kernel.Roots{Proc: dir}, StateDir: dir, Socket: filepath.Join(dir, "nobody")}}
	for _, c := range []struct {
		ref     string
		expired bool
		tried   int
	}{{"", true, 1}, {"7", true, 1}, {"8", true, 0}, {"", false, 3}} {
		done, err := restore(t.Context(), f, c.ref, c.expired)
		testkit.Must(t, err)
		if len(done.Outcomes) != c.tried || c.tried == 1 && done.Outcomes[0].Object != "past" {
			t.Errorf("%+v: %+v", c, done.Outcomes)
		}
	}
}
