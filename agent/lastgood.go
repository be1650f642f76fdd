package agent

import (
	"path/filepath"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// lastGoodFile is the file in the state directory in which the last good policy
// outlives the agent. Unlike set.json it names containers by patterns, so that it
// holds for any boot.
const lastGoodFile = "policy.json"

// maxLastGood bounds the file, in bytes: the most that a directory may hold, and
// twice as much for the escapes of JSON.
const maxLastGood = 2 * policy.MaxFiles * policy.MaxFileSize

func fileOfLastGood(cfg Config) stateFile {
	return stateFile{filepath.Join(cfg.StateDir, lastGoodFile), maxLastGood}
}

// recallPolicy puts in force what was the last good policy of an earlier agent,
// for the case that the files are broken now.
func (a *Agent) recallPolicy() {
	var kept policy.Kept
	_, err := fileOfLastGood(a.cfg).read(&kept)
	if err == nil {
		err = a.policy.Recall(kept)
	}
	if err != nil {
		a.log.Warn("the last good policy of an earlier agent is not usable", "err", err)
	}
}

// keepPolicy writes the last good policy down, unless it has been.
func (a *Agent) keepPolicy() {
	a.keeping.Lock()
	defer a.keeping.Unlock()
	kept := a.policy.Kept()
	if kept.When.IsZero() || kept.When.Equal(a.keptWhen) {
		return
	}
	if err := fileOfLastGood(a.cfg).write(kept); err != nil {
		a.log.Error("the policy is not written down: with broken files a restarted agent would have none", "err", err)
		return
	}
	a.keptWhen = kept.When
}

// broken says what holds while the policy files are not usable.
func broken(since time.Time) string {
	if since.IsZero() {
		return "policy is not usable, and there is no last good one: neither files nor labels are in force"
	}
	return "policy is not usable; the last good one stays in force"
}
