package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
	"golang.org/x/sys/unix"
)

// state is the content of a sandbox's file.
type state struct {
	discover.Sandbox
	file string
}

// create writes the state for the first time, which reserves the name.
func (s *state) create() error {
	err := s.put(os.Link)
	if errors.Is(err, fs.ErrExist) {
		return ErrExists
	}
	return err
}

func (s *state) write() error { return s.put(os.Rename) }

// put writes the whole state before place moves it to its name.
func (s *state) put(place func(from, to string) error) error {
	data, err := json.Marshal(s.Sandbox)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(s.file), "."+s.Name+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after a rename
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return place(f.Name(), s.file)
}

// Sweep removes the remains of sandboxes in dir whose maker has ended: it kills the processes in their
// cgroups, and removes the cgroups and state files. It returns the names of these sandboxes. Sandboxes
// of living makers, such as this process, stay. roots may be zero.
func Sweep(roots kernel.Roots, dir string) (swept []string, err error) {
	if roots == (kernel.Roots{}) {
		roots = kernel.Default()
	}
	all, err := discover.ReadSandboxes(dir)
	if err != nil {
		return nil, fmt.Errorf("sweep sandboxes: %w", err)
	}
	var errs []error
	for _, left := range all {
		s := state{left, filepath.Join(dir, left.Name+".json")}
		if s.Maker.Alive(roots.Proc) {
			continue
		}
		if err := s.remove(roots); err != nil {
			errs = append(errs, fmt.Errorf("sweep sandbox %s: %w", s.Name, err))
			continue
		}
		swept = append(swept, s.Name)
	}
	os.Remove(dir) // fails unless it is empty
	return swept, errors.Join(errs...)
}

func (s *state) remove(roots kernel.Roots) error {
	if s.Init.Alive(roots.Proc) {
		if err := unix.Kill(s.Init.PID, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return err
		}
	}
	for _, dir := range s.Cgroups {
		// The file decides what to kill and remove, so accept only a sandbox's cgroups.
		if !strings.HasPrefix(dir, roots.Cgroup+"/") || dir != filepath.Clean(dir) || filepath.Base(dir) != Prefix+s.Name {
			return fmt.Errorf("state file names %q, which is not a sandbox's cgroup", dir)
		}
	}
	if err := removeGroups(s.Cgroups); err != nil {
		return err
	}
	return os.Remove(s.file)
}
