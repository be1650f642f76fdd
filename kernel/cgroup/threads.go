package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

const threadsFile, procsFile = "cgroup.threads", "cgroup.procs"

// Threads returns the threads of one cgroup v2 directory and of those below, by their ids in the
// caller's pid namespace. It returns up to most of them, the first that the kernel lists. Errors:
// journal.ErrGone for the directory itself. It leaves out cgroups that go meanwhile.
func Threads(dir string, most int) (tids []int, err error) {
	for dirs := []string{dir}; len(dirs) > 0 && len(tids) < most; dirs = dirs[1:] {
		more, err := threads(filepath.Join(dirs[0], threadsFile), most-len(tids))
		tids = append(tids, more...)
		below, listErr := Children(dirs[0], max(most-len(dirs), 0))
		dirs = append(dirs, below...)
		if err = errors.Join(err, listErr); err != nil && (dirs[0] == dir || !errors.Is(err, journal.ErrGone)) {
			return nil, err
		}
	}
	return tids, nil
}

// Procs returns up to most of the processes in a cgroup directory itself, kernel threads included.
// A threaded cgroup has none. Errors: journal.ErrGone.
func Procs(dir string, most int) ([]int, error) {
	pids, err := threads(filepath.Join(dir, procsFile), most)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	return pids, err
}

// threads reads a file of a cgroup that lists threads, up to most.
func threads(path string, most int) (tids []int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("list threads: %w", gone(err))
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for len(tids) < most && lines.Scan() {
		if tid, err := strconv.Atoi(lines.Text()); err == nil && tid > 0 { // 0: of another pid namespace
			tids = append(tids, tid)
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, unix.ENODEV) { // a cgroup that goes ends the list
		return nil, fmt.Errorf("list threads: %w", err)
	}
	return tids, nil
}

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
