package agent

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// keep finds the containers for which something is in force because of what a
// runtime reported, while that runtime reports nothing: it does not answer (to an
// agent that was started again), or has not yet answered about all containers
// that it lists. The Set goes on with what the runtime said before; these are the
// containers of which no agent could write that down. Only the cgroup tree knows
// them. It knows no labels, so policy has nothing to say. The result is the name of
// the runtime, by container.
func (a *Agent) keep(snap container.Snapshot) map[container.ID]string {
	silent := make(map[string]bool)
	for _, s := range snap.Sources {
		// The cgroup tree is nobody who could tell more of one later.
		if s.Name != container.CgroupSource && (!s.Listed || s.Partial) {
			silent[s.Name] = true
		}
	}
	nameless := make(map[container.ID]bool)
	for _, c := range snap.Containers {
		if c.Source == container.CgroupSource {
			nameless[c.ID] = true
		}
	}
	if len(silent) == 0 || len(nameless) == 0 {
		return nil
	}
	kept := make(map[container.ID]string)
	for _, e := range a.journal.Entries() {
		if id := container.ID(e.Owner.Container); nameless[id] && silent[e.Source] {
			kept[id] = e.Source
		}
	}
	return kept
}

// known says whether a Target was made with what a runtime knows.
func known(t policy.Target) bool {
	return t.Container.Source != "" && t.Container.Source != container.CgroupSource
}
