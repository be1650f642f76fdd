package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Adopt moves the journal of the boot that is running, and the files of the given
// names beside it, from one directory to another, where a later release has its
// journal. What is there already stays, and the one in from goes, as it is older. A
// kill at any point leaves the entries in one of the two or, the same ones, in both.
// A directory that does not exist has nothing to move. Errors: ErrBusy.
func Adopt(from, to string, beside ...string) error {
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	boot, err := BootID("/proc")
	if err != nil {
		return fmt.Errorf("adopt journal of %s: %w", from, err)
	}
	if err := adopt(from, to, append([]string{prefix + boot}, beside...)); err != nil {
		return fmt.Errorf("adopt journal of %s: %w", from, err)
	}
	return nil
}

func adopt(from, to string, names []string) error {
	old, err := os.Open(from)
	if err != nil {
		return err
	}
	s := &store{dir: old}
	defer s.close()
	if err := s.acquire(); err != nil {
		return err
	}
	for _, name := range names {
		if err := move(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

// move is a rename that may lead to another file system.
func move(from, to string) error {
	data, err := os.ReadFile(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := os.Stat(to); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(to+".new", data, 0o600); err != nil {
			return errors.Join(err, os.Remove(to+".new"))
		}
		if err := os.Rename(to+".new", to); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	return os.Remove(from)
}
