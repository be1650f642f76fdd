package agent

import (
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/policy"
)

// keep finds the containers with anything in force because of a runtime's report, while that
// runtime reports nothing: it does not answer (a restarted agent), or has not yet answered about
// all containers in its list. The Set keeps the runtime's earlier reports; these are the containers
// missing there, because no agent could store them. Only the cgroup tree knows them. It knows no
// labels, so policy has nothing for them. The result is the name of the runtime, by container.
func (a *Agent) keep(snap discover.Snapshot) map[container.ID]string {
	silent := make(map[string]bool)
	for _, s := range snap.Sources {
		// The cgroup tree will not learn more later.
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

// known reports whether a Target was made with what a runtime knows.
func known(t policy.Target) bool {
	return t.Container.Source != "" && t.Container.Source != container.CgroupSource
}
