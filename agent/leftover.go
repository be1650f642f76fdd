package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"golang.org/x/sys/unix"
)

// openJournal opens the journal in the state directory, with a copy in a directory of this network
// namespace: what an agent has changed is found although its state was damaged, removed, or is
// elsewhere. The caller is the only agent of the namespace.
func openJournal(cfg Config) (*journal.Journal, error) {
	second, err := ownJournal(cfg.Roots.Proc)
	if err != nil {
		cfg.Log.Warn("the journal has no copy", "err", err)
	}
	j, err := journal.OpenCopied(cfg.StateDir, second)
	if errors.Is(err, journal.ErrCorrupt) {
		cfg.Log.Error("journal was damaged; going on with the rest of it", "err", err)
		j, err = journal.OpenCopied(cfg.StateDir, second)
	}
	return j, err
}

// ownJournal returns the directory of the copy. Its name is the cookie of the network namespace:
// unlike its inode, no later namespace of this boot has the same.
func ownJournal(proc string) (string, error) {
	dir, _, err := own(proc)
	if err != nil {
		return "", err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("identify network namespace: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return "", fmt.Errorf("identify network namespace: %w", err)
	}
	return filepath.Join(dir, fmt.Sprintf("net%d", cookie)), nil
}

// RestoreAlone undoes the changes that match, which an agent has left. Without another agent in this
// network namespace it also finds those of a journal that was damaged or removed. The error does not
// contain those of the outcomes. Errors: journal.ErrBusy if an agent has StateDir; journal.ErrVersion.
func RestoreAlone(cfg Config, match func(journal.Entry) bool) (out []journal.Outcome, err error) {
	cfg.Log = slog.New(slog.DiscardHandler)
	open := func() (*journal.Journal, error) { return journal.Open(cfg.StateDir) }
	if only, err := alone(cfg.Roots.Proc); err == nil {
		defer only.Close()
		open = func() (*journal.Journal, error) { return openJournal(cfg) }
	}
	j, err := open()
	if errors.Is(err, journal.ErrCorrupt) {
		j, err = open()
	}
	if err != nil {
		return nil, err
	}
	out, _ = j.Restore(kernel.Opener(cfg.Roots), match)
	return out, errors.Join(kernel.Tidy(cfg.Roots, out), j.Close())
}
