package agent

import (
	"errors"
	"log/slog"
	"net/url"
	"path/filepath"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// openJournal opens the journal in the state directory, with a copy in /run/fairlead: what an agent has
// changed is found although its state was damaged or removed.
func openJournal(cfg Config) (*journal.Journal, error) {
	second := ""
	if state, err := filepath.Abs(cfg.StateDir); err == nil {
		if dir, _, err := own(cfg.Roots.Proc); err == nil { // the journal works without the copy
			second = filepath.Join(dir, url.PathEscape(state))
		}
	}
	j, err := journal.OpenCopied(cfg.StateDir, second)
	if errors.Is(err, journal.ErrCorrupt) {
		cfg.Log.Error("journal was damaged; going on with the rest of it", "err", err)
		j, err = journal.OpenCopied(cfg.StateDir, second)
	}
	return j, err
}

// RestoreAlone undoes the changes that match, which an agent has left; it finds them although the
// journal was damaged or removed. The error does not contain those of the outcomes. Errors:
// journal.ErrBusy if an agent has StateDir; journal.ErrVersion.
func RestoreAlone(cfg Config, match func(journal.Entry) bool) (out []journal.Outcome, err error) {
	cfg.Log = slog.New(slog.DiscardHandler)
	j, err := openJournal(cfg)
	if err != nil {
		return nil, err
	}
	out, _ = j.Restore(kernel.Opener(cfg.Roots), match)
	return out, errors.Join(kernel.Tidy(cfg.Roots, out), j.Close())
}
