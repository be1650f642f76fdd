package agent

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrTwo means that another agent works in this network namespace: the two would undo each other's
// qdiscs and offloads, whatever their state directories.
var ErrTwo = errors.New("another agent works in this network namespace")

// alone makes this process the only agent of its network namespace until the file is closed. The
// kernel releases the lock with the process, however that ends; the file stays. Errors: ErrTwo.
func alone(proc string) (*os.File, error) {
	dir, ns, err := own(proc)
	var f *os.File
	if err == nil {
		f, err = openLock(dir, ns+".lock", 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("look for another agent in this network namespace: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		pid, _ := io.ReadAll(io.LimitReader(f, 20)) // nothing: it has only just taken the lock
		return nil, errors.Join(fmt.Errorf("%w: process %s", ErrTwo, pid), f.Close())
	}
	if err == nil {
		err = sign(f, proc)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock this network namespace: %w", err), f.Close())
	}
	return f, nil
}

// own returns the directory of what belongs to a network namespace, and the number of this one. It
// is /run/fairlead as process 1 sees it: agents in containers meet there, too, and no other container
// gets there. Where this process may not look through that one's root, its own has to do.
func own(proc string) (dir, number string, err error) {
	var ns unix.Stat_t
	if err := unix.Stat(filepath.Join(proc, "self/ns/net"), &ns); err != nil {
		return "", "", err
	}
	root := filepath.Join(proc, "1/root")
	if unix.Access(root, unix.X_OK) != nil {
		root = "/"
	}
	return filepath.Join(root, "run/fairlead"), strconv.FormatUint(ns.Ino, 10), nil
}

// sign writes the number of this process into f, as the host counts.
func sign(f *os.File, proc string) error {
	pid, err := os.Readlink(filepath.Join(proc, "self"))
	if err != nil {
		return err
	}
	return put(f, pid)
}

// openLock opens a file for flock(2), and makes it and its directory if they are missing.
func openLock(dir, name string, mode os.FileMode) (*os.File, error) {
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}
