package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// KindGroup is the journal kind of a cgroup directory.
const KindGroup = "group"

// The values of a group knob.
const (
	Present = "present"
	Absent  = "absent"
)

// Group returns the knob of a cgroup directory that fairlead makes for itself. Its value is
// [Present] or [Absent]; Write makes or removes the directory. Removing fails with EBUSY while
// threads are in it. They have to be moved out first, which the journal's order ensures.
func Group(path string) journal.Knob { return group(path) }

type group string

func (g group) Ref() journal.Ref { return journal.Ref{Kind: KindGroup, Object: string(g)} }

func (g group) Read() (string, error) {
	switch _, err := os.Lstat(string(g)); {
	case err == nil:
		return Present, nil
	case errors.Is(err, os.ErrNotExist):
		return Absent, nil
	default:
		return "", fmt.Errorf("read cgroup: %w", err)
	}
}

func (g group) Write(value string) error {
	switch value {
	case Present:
		if err := os.Mkdir(string(g), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make cgroup: %w", gone(err))
		}
	case Absent:
		if err := unix.Rmdir(string(g)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove cgroup %s: %w", string(g), err)
		}
	default:
		return fmt.Errorf("write cgroup %s: value %q is neither %s nor %s", string(g), value, Present, Absent)
	}
	return nil
}

// Children returns the paths of up to most cgroups directly below a directory, even with an error.
// It reads little more of the directory.
func Children(dir string, most int) (dirs []string, err error) {
	const some = 128 // a cgroup has fewer files of its own
	f, err := os.Open(dir)
	if err == nil {
		defer f.Close()
	}
	for err == nil && len(dirs) < most {
		var list []os.DirEntry
		list, err = f.ReadDir(some)
		for _, e := range list {
			if e.IsDir() && len(dirs) < most {
				dirs = append(dirs, filepath.Join(dir, e.Name()))
			}
		}
	}
	slices.Sort(dirs)
	if err != nil && !errors.Is(err, io.EOF) {
		return dirs, fmt.Errorf("list cgroups: %w", gone(err))
	}
	return dirs, nil
}
