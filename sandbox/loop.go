package sandbox

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Loop is a loop device: a disk of its own over a scratch file.
type Loop struct {
	Path string // "/dev/loop0"

	device, file *os.File
}

// NewLoop makes a disk of so many bytes over a file in dir, which nobody sees and which
// goes with the disk. All of it is written, so that reading it costs what reading costs.
// It needs root. The caller closes it.
func NewLoop(dir string, size int64) (_ *Loop, err error) {
	l := &Loop{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make loop device: %w", err), l.Close())
		}
	}()
	if l.file, err = os.CreateTemp(dir, "fairlead-loop"); err != nil {
		return nil, err
	}
	if err := os.Remove(l.file.Name()); err != nil {
		return nil, err
	}
	block := make([]byte, 1<<20)
	for at := int64(0); at < size; at += int64(len(block)) {
		if _, err := l.file.WriteAt(block[:min(int64(len(block)), size-at)], at); err != nil {
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
		if l.Path, l.device, err = bindLoop(n, l.file); !errors.Is(err, unix.EBUSY) {
			return l, err
		}
	}
	return nil, err
}

func bindLoop(n int, file *os.File) (string, *os.File, error) {
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
	if err := unix.IoctlLoopConfigure(int(device.Fd()), &unix.LoopConfig{Fd: uint32(file.Fd())}); err != nil {
		return "", nil, errors.Join(err, device.Close())
	}
	return path, device, nil
}

// Close lets go of the disk, which ends when nobody has it open any more.
func (l *Loop) Close() error {
	var errs []error
	if l.device != nil {
		_, err := unix.IoctlRetInt(int(l.device.Fd()), unix.LOOP_CLR_FD)
		errs = append(errs, err, l.device.Close())
	}
	if l.file != nil {
		errs = append(errs, l.file.Close())
	}
	l.device, l.file = nil, nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("let go of %s: %w", l.Path, err)
	}
	return nil
}
