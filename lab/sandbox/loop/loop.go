// Package loop makes disks for experiments and tests: loop devices over scratch files. It formats
// and mounts nothing. Packages bench and the tests call it.
package loop

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Disk is a loop device: a disk of its own over a scratch file.
type Disk struct {
	Path string // "/dev/loop0"

	device, file *os.File
}

// New makes a disk of so many bytes over a file in dir, which is unlinked at once and goes with the
// disk. All of it is written, so that reads have their full cost. It needs root. The caller closes
// it.
func New(dir string, size int64) (_ *Disk, err error) {
	d := &Disk{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make loop device: %w", err), d.Close())
		}
	}()
	if d.file, err = os.CreateTemp(dir, "fairlead-loop"); err != nil {
		return nil, err
	}
	if err := os.Remove(d.file.Name()); err != nil {
		return nil, err
	}
	block := make([]byte, 1<<20)
	for at := int64(0); at < size; at += int64(len(block)) {
		if _, err := d.file.WriteAt(block[:min(int64(len(block)), size-at)], at); err != nil {
			return nil, err
		}
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	const tries = 64 // others take loop devices, too
	for range tries {
		var n int
		if n, err = unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE); err != nil {
			return nil, err
		}
		if d.Path, d.device, err = bind(n, d.file); !errors.Is(err, unix.EBUSY) {
			return d, err
		}
	}
	return nil, err
}

func bind(n int, file *os.File) (string, *os.File, error) {
	path := fmt.Sprintf("/dev/loop%d", n)
	// A host that has no udev has no node for a device that has just been made.
	const major = 7
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, uint32(n)))); err != nil && err != unix.EEXIST {
		return "", nil, err
	}
	device, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return "", nil, err
	}
	// The kernel releases the file when the last opener of the device closes it, also when this
	// process is killed.
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	if err := unix.IoctlLoopConfigure(int(device.Fd()), &config); err != nil {
		return "", nil, errors.Join(err, device.Close())
	}
	return path, device, nil
}

// Close releases the disk, which ends when its last opener closes it.
func (d *Disk) Close() error {
	var errs []error
	if d.device != nil {
		_, err := unix.IoctlRetInt(int(d.device.Fd()), unix.LOOP_CLR_FD)
		errs = append(errs, err, d.device.Close())
	}
	if d.file != nil {
		errs = append(errs, d.file.Close())
	}
	d.device, d.file = nil, nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("let go of %s: %w", d.Path, err)
	}
	return nil
}
