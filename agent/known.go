package agent

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/policy"
)

// knownName is the file in the state directory with the runtimes' records of running containers. An
// agent uses it while the runtimes do not answer yet.
const knownName = "containers.json"

// maxKnown limits that file, in bytes. Records that do not fit are left out, those with the most
// labels first. The next agent then knows their containers only by their journal entries.
const maxKnown = 16 << 20

// file returns a file of the state directory for this boot, limited to most bytes.
func (cfg Config) file(name string, most int) kernel.StateFile {
	return kernel.StateFile{Path: filepath.Join(cfg.StateDir, name), Most: most, Proc: cfg.Roots.Proc}
}

// loadKnown loads what an earlier agent knew; nil if there is nothing.
func loadKnown(cfg Config) *discover.Known {
	in := new(discover.Known)
	found, err := cfg.file(knownName, maxKnown).Read(in)
	if err != nil {
		cfg.Log.Warn("what an earlier agent knew of containers cannot be read; runtimes must answer first", "err", err)
	}
	if err != nil || !found {
		return nil
	}
	return in
}

// remember stores the known records if they have changed.
func (a *Agent) remember(now *discover.Known) {
	if now == nil || now == a.remembered {
		return
	}
	a.remembered = now
	err := a.cfg.file(knownName, maxKnown).Write(within(now, maxKnown))
	if err != nil && !a.forgetful {
		a.log.Warn("what is known of containers cannot be written down: an agent that starts while a runtime does not answer will not know their policy", "err", err)
	}
	a.forgetful = err != nil
}

// within drops the largest records until the rest fits into most bytes.
func within(known *discover.Known, most int) *discover.Known {
	type sized struct {
		source string
		record discover.Record
		bytes  int
	}
	var all []sized
	for _, source := range slices.Sorted(maps.Keys(known.Records)) {
		for _, rec := range known.Records[source] {
			data, _ := json.Marshal(rec) // strings, numbers and maps of them
			all = append(all, sized{source, rec, len(data) + len(",")})
		}
	}
	slices.SortStableFunc(all, func(a, b sized) int { return a.bytes - b.bytes })
	out := &discover.Known{Records: make(map[string][]discover.Record), Pods: known.Pods}
	left := most - 1024 // for the JSON around the records
	if pods, _ := json.Marshal(known.Pods); len(pods) > left/2 {
		out.Pods = nil
	} else {
		left -= len(pods)
	}
	for _, s := range all {
		if left -= s.bytes; left < 0 {
			break
		}
		out.Records[s.source] = append(out.Records[s.source], s.record)
	}
	return out
}

// say logs once that a source's report is incomplete, and once that it has recovered.
func (a *Agent) say(sources []discover.SourceStatus) {
	for _, s := range sources {
		text := ""
		if s.Err != nil {
			text = s.Err.Error()
		}
		switch was := a.said[s.Name]; {
		case text == was:
			continue
		case text == "":
			a.log.Info("source answers again", "source", s.Name)
		default:
			a.log.Warn("source does not say all it should: what was known counts until it does", "source", s.Name, "err", text)
		}
		a.said[s.Name] = text
	}
}

// keep finds the containers that have anything in force because of a runtime's report, while that
// runtime does not report them: it has just restarted, or has not answered about all its
// containers. The Set keeps earlier reports. The containers found here are those without one,
// because no agent could store it. Only the cgroup tree knows them, without labels, so policy has
// nothing for them. The result maps each container to the name of its runtime.
func (a *Agent) keep(snap discover.Snapshot) map[container.ID]string {
	silent := make(map[string]bool)
	for _, s := range snap.Sources {
		// The cgroup tree never learns more about a container.
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

// known reports whether a Target is based on a runtime's report.
func known(t policy.Target) bool {
	return t.Container.Source != "" && t.Container.Source != container.CgroupSource
}

// lastGoodFile is the file in the state directory that keeps the last good policy for the next
// agent. Unlike set.json it names containers by patterns, so that it holds for any boot.
const lastGoodFile = "policy.json"

// maxLastGood limits the file, in bytes: twice the most that a policy directory may hold, for the
// escapes of JSON.
const maxLastGood = 2 * policy.MaxFiles * policy.MaxFileSize

func (cfg Config) lastGood() kernel.StateFile {
	return kernel.StateFile{Path: filepath.Join(cfg.StateDir, lastGoodFile), Most: maxLastGood}
}

// recallPolicy puts the last good policy of an earlier agent in force, in case the files are
// invalid now.
func (a *Agent) recallPolicy() {
	var kept policy.Kept
	_, err := a.cfg.lastGood().Read(&kept)
	if err == nil {
		err = a.policy.Recall(kept)
	}
	if err != nil {
		a.log.Warn("the last good policy of an earlier agent is not usable", "err", err)
	}
}

// keepPolicy stores the last good policy, unless it is stored.
func (a *Agent) keepPolicy() {
	a.keeping.Lock()
	defer a.keeping.Unlock()
	kept := a.policy.Kept()
	if kept.When.IsZero() || kept.When.Equal(a.keptWhen) {
		return
	}
	if err := a.cfg.lastGood().Write(kept); err != nil {
		a.log.Error("the policy is not written down: with broken files a restarted agent would have none", "err", err)
		return
	}
	a.keptWhen = kept.When
}
