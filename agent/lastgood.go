package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
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

// recallPolicy puts in force what was the last good policy of an earlier agent,
// for the case that the files are broken now.
func (a *Agent) recallPolicy() {
	kept, err := readLastGood(filepath.Join(a.cfg.StateDir, lastGoodFile))
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
	data, err := json.Marshal(kept)
	if err == nil {
		err = writeWhole(filepath.Join(a.cfg.StateDir, lastGoodFile), data)
	}
	if err != nil {
		a.log.Error("the policy is not written down: with broken files a restarted agent would have none", "err", err)
		return
	}
	a.keptWhen = kept.When
}

func readLastGood(path string) (kept policy.Kept, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return kept, nil
	}
	if err != nil {
		return kept, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxLastGood))
	if err == nil {
		err = json.Unmarshal(data, &kept)
	}
	if err != nil {
		return policy.Kept{}, fmt.Errorf("read %s: %w", path, err)
	}
	return kept, nil
}

// writeWhole writes a file of the state directory, all of it or none.
func writeWhole(path string, data []byte) error {
	next := path + ".next"
	if err := os.WriteFile(next, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// broken says what holds while the policy files are not usable.
func broken(since time.Time) string {
	if since.IsZero() {
		return "policy is not usable, and there is no last good one: neither files nor labels are in force"
	}
	return "policy is not usable; the last good one stays in force"
}
