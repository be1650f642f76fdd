package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// The last good policy outlives the agent: one that starts with broken files goes on
// with it. One that has none says so.
func TestAgentStartsWithBrokenPolicy(t *testing.T) {
	r := newRig(t, 1)
	file := filepath.Join(r.policies, "10.yaml")
	write := func(text string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(file, []byte(text), 0o600))
	}
	status := func() api.PolicyStatus {
		t.Helper()
		st, err := r.client.Status(t.Context())
		testkit.Must(t, err)
		return st.Policy
	}
	write("match: {name: box-1}\nset: {netcpu: isolate}\n")
	r.start()
	r.set.set(true, box(1, ""))
	r.untilValue(1, "isolated")
	was := status()
	testkit.Must(t, r.stop())
	if got := r.host.get(t, 1); got != "plain" {
		t.Errorf("without an agent it is %q", got)
	}

	write("match: {name: box-1}\nset: {netcpu: isolat}\n")
	r.start()
	r.untilValue(1, "isolated")
	if st := status(); st.OK || !strings.Contains(st.Error, "10.yaml:2") || !st.Loaded.Equal(was.Loaded) || len(st.Files) != 1 {
		t.Errorf("with broken files: %+v", st)
	}
	testkit.Must(t, r.stop())

	for _, content := range []string{"", "{", `{"dir":"/elsewhere","when":"2026-01-01T00:00:00Z"}`} {
		if content == "" {
			testkit.Must(t, os.Remove(filepath.Join(r.state, lastGoodFile)))
		} else if err := os.WriteFile(filepath.Join(r.state, lastGoodFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		r.start()
		r.until("it is looked at", func() bool { return r.state1(1) == api.StateDone })
		if st := status(); st.OK || !st.Loaded.IsZero() || r.host.get(t, 1) != "plain" {
			t.Errorf("without a last good policy (%q): %+v, the value is %q", content, st, r.host.get(t, 1))
		}
		testkit.Must(t, r.stop())
	}
}

func FuzzLastGood(f *testing.F) {
	f.Add([]byte(`{"dir":"/d","when":"2026-01-01T00:00:00Z","files":[{"name":"/d/a.yaml","text":"match: {name: x}\nset: {netcpu: auto}"}]}`))
	f.Add([]byte(`{"dir":"/d","when":"2026-01-01T00:00:00Z","files":[null,{"name":"\u001b","text":"labels: deny"}]}`))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := Config{StateDir: t.TempDir()}.lastGood()
		testkit.Must(t, os.WriteFile(file.Path, data, 0o600))
		var kept policy.Kept
		if _, err := file.Read(&kept); err != nil {
			return
		}
		store := policy.NewStore("/d", time.Now)
		if store.Recall(kept) == nil {
			store.Resolve([]container.Container{box(1, "")})
		}
	})
}
