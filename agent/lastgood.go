package agent

import (
	"path/filepath"
	"time"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/policy"
)

// lastGoodFile is the file in the state directory that keeps the last good policy for the next
// agent. Unlike set.json it names containers by patterns, so that it holds for any boot.
const lastGoodFile = "policy.json"

// maxLastGood limits the file, in bytes: the most that a directory may hold, and twice as much for
// the escapes of JSON.
const maxLastGood = 2 * policy.MaxFiles * policy.MaxFileSize

func (cfg Config) lastGood() kernel.StateFile {
	return kernel.StateFile{Path: filepath.Join(cfg.StateDir, lastGoodFile), Most: maxLastGood}
}

// recallPolicy puts the last good policy of an earlier agent in force, in case the files are broken
// now.
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

// broken explains what holds while the policy files are invalid.
func broken(since time.Time) string {
	if since.IsZero() {
		return "policy is not usable, and there is no last good one: neither files nor labels are in force"
	}
	return "policy is not usable; the last good one stays in force"
}
