package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

// ErrMany is returned by IDs, wrapped, together with the ids found so far.
var ErrMany = errors.New("more cgroups than are looked at")

// IDs returns the ids of the cgroup at dir and of those below it, up to most: a container may have
// the right to make any number of cgroups. It leaves out groups that go meanwhile. If dir itself
// has gone, the error is fs.ErrNotExist.
func IDs(dir string, most int) ([]uint64, error) {
	var ids []uint64
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			return nil
		}
		var id uint64
		if err == nil {
			id, err = ID(path)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != dir:
			return nil
		case err != nil:
			return err
		case len(ids) == most:
			return ErrMany
		}
		ids = append(ids, id)
		return nil
	})
	if err != nil {
		return ids, fmt.Errorf("cgroups of %s: %w", dir, err)
	}
	return ids, nil
}
