package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
)

// testBothKilled kills the agent and the engine, and starts the agent first: the engine's last
// answer counts until the engine is back. One container loses its label meanwhile.
func (h *host) testBothKilled(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "kept", "--label", isolate)
	h.sleeper(t, "bared", "--label", isolate)
	kept, bared := h.agent.isolated("kept", 1), h.agent.isolated("bared", 1)
	h.agent.kill()
	h.Kill()

	config := filepath.Join(filepath.Dir(h.Socket), "data", "containers", bared.RuntimeID, "config.v2.json")
	data, err := os.ReadFile(config)
	must(t, err)
	without := strings.Replace(string(data), `"fairlead.netcpu":"isolate"`, `"once":"isolate"`, 1)
	if without == string(data) {
		t.Fatalf("no label in %s", data)
	}
	must(t, os.WriteFile(config, []byte(without), 0o600))

	h.agent.start() // its footprint at the start is that of an agent with two containers to isolate
	for _, was := range []isolation{kept, bared} {
		c := h.agent.reaches(was.Name, api.StateDone)
		if c.ID != was.ID || c.Source != "docker" {
			t.Errorf("%s is now %+v, was %+v", was.Name, c, was.Container)
		}
		must(t, livesIn(was.threads[0], was.Cgroup.CPU))
	}
	mustSay(t, h.agent.run("ps"), 0, "kept", "bared", "source docker: ", "refused")

	h.Start(t)
	again := h.agent.isolated("kept", 1)
	if again.ID != kept.ID || !slices.Equal(again.threads, kept.threads) {
		t.Errorf("kept is %+v, was %+v", again, kept)
	}
	c := h.agent.reaches("bared", api.StateDone)
	await(t, "bared to be let go of", func() error {
		x, err := h.agent.api.Explain(t.Context(), c.Name)
		if err == nil && (len(x.Changes) > 0 || livesIn(bared.threads[0], bared.Cgroup.CPU) == nil) {
			err = fmt.Errorf("it has the changes %+v", x.Changes)
		}
		return err
	})
	h.remove(t, "kept", "bared")
	h.agent.forgets(again)
	h.agent.rests()
}

// testEngineHangs kills the agent while the engine accepts connections and answers nothing. What is
// in force stays for as long as that lasts.
func (h *host) testEngineHangs(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "kept", "--label", isolate)
	was := h.agent.isolated("kept", 1)
	h.agent.kill()
	h.Hang()
	defer h.Resume()
	h.agent.launch()
	await(t, "the agent to have waited for the engine in vain", func() error {
		st, err := h.agent.api.Status(t.Context())
		if err == nil && !slices.ContainsFunc(st.Sources, func(s api.SourceStatus) bool { return s.Name == "docker" && s.Error != "" }) {
			err = fmt.Errorf("sources %+v", st.Sources)
		}
		return err
	})
	if c := h.agent.reaches("kept", api.StateDone); c.ID != was.ID || c.Source != "docker" {
		t.Errorf("%s is now %+v, was %+v", was.Name, c, was.Container)
	}
	must(t, livesIn(was.threads[0], was.Cgroup.CPU))
	h.Resume()
	if again := h.agent.isolated("kept", 1); !slices.Equal(again.threads, was.threads) {
		t.Errorf("threads %v, before %v", again.threads, was.threads)
	}
	h.remove(t, "kept")
	h.agent.forgets(was)
	h.agent.rests()
}
