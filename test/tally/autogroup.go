package main

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// autogroup is the file of the sysctl that makes the scheduler treat each session as a group.
const autogroup = "/proc/sys/kernel/sched_autogroup_enabled"

// ungrouped turns autogroup off, where it is on, for processes started from now on, and returns a
// function that turns it on again. A run is one session with work on all CPUs, and on some kernels
// a sender in such a group starves the kernel's own workers (docs/limits.md, "Linux 6.18
// and later"). A run without permission to turn it off (no root, as for the tests of a library)
// keeps the host's setting. A killed run leaves it off.
func ungrouped(path string) (restore func() error, err error) {
	was, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && string(was) != "1\n" {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	err = os.WriteFile(path, []byte("0\n"), 0o644)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return func() error { return nil }, nil
	}
	return func() error { return os.WriteFile(path, was, 0o644) }, err
}
