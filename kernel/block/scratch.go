package block

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Holding returns the disk that a directory is on. Errors: ErrNoDevice if it is on no disk, such as
// in memory, or on a file system of several devices; ErrNoRequests.
func Holding(sys, dir string) (Disk, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return Disk{}, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	d, err := Find(sys, unix.Major(st.Dev), unix.Minor(st.Dev))
	if err != nil {
		return Disk{}, fmt.Errorf("disk of %s: %w", dir, err)
	}
	return d, nil
}

// Scratch makes a file of mib MiB in a directory. The file contains no zeros, because some disks do
// not store zeros. It has no name, so it disappears however the program ends. The caller closes the
// file.
func Scratch(ctx context.Context, dir string, mib int64) (file *os.File, err error) {
	if file, err = os.CreateTemp(dir, "fairlead-calibrate"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	if err := os.Remove(file.Name()); err != nil {
		return nil, err
	}
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i*7 + i>>8)
	}
	for range mib {
		if _, err := file.Write(block); err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	return file, file.Sync()
}
