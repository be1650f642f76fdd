package e2e

import (
	"slices"
	"testing"
)

// testDockerEnds uses an engine that ends its containers when it restarts.
func (h *host) testDockerEnds(t *testing.T) {
	defer h.with(t)()
	h.Kill()
	h.Without("--live-restore")
	h.Start(t)
	// As process 1 it would ignore the stop signal, and the engine would wait.
	h.sleeper(t, "taken", "--label", isolate, "--stop-signal", "KILL")
	before := h.agent.isolated("taken", 1)
	h.Kill()
	h.Start(t)
	h.agent.forgets(before)
	h.Must(t, "start", "taken")
	after := h.agent.isolated("taken", 1)
	h.remove(t, "taken")
	h.agent.forgets(after)
	h.agent.rests()
}

// testAgentKilled kills the agent, and ends a container while no agent runs. A thread in its cgroup
// may keep the engine from removing that, but only until an agent runs again.
func (h *host) testAgentKilled(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "orphan", "--label", isolate)
	h.sleeper(t, "heir", "--label", isolate)
	orphan, heir := h.agent.isolated("orphan", 1), h.agent.isolated("heir", 1)
	h.agent.kill()
	h.remove(t, "orphan")
	h.agent.start()
	h.vacates(orphan)
	again := h.agent.isolated("heir", 1)
	if !slices.Equal(again.threads, heir.threads) {
		t.Errorf("heir has threads %v, had %v", again.threads, heir.threads)
	}
	h.remove(t, "heir")
	h.agent.forgets(heir)
	h.agent.rests()
	h.atStart = h.agent.footprint()
}
