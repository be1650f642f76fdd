package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// turns is the file that a run locks while it changes this machine.
const turns = "/run/fairlead-test.lock"

// alone waits until no other run is under way on this machine, and returns a function that lets the
// next one begin. Two concurrent runs would take each other's cgroups for their own. The kernel
// releases the lock of a killed run. A user without permission to create the file is not root, and
// changes nothing that other runs see.
func alone(ctx context.Context, path string, out io.Writer) (next func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrPermission) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open what runs of the tests take turns by: %w", err)
	}
	for said := false; ; said = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f.Close, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !said {
			fmt.Fprintln(out, "waiting for another run of the tests on this machine to end")
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for another run of the tests: %w", ctx.Err())
		}
	}
}
