package testkit

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Disk is a loop device: a disk of its own over a scratch file.
type Disk struct {
	Path string // "/dev/loop0"

	t      testing.TB
	device *os.File
}

// NewDisk makes a disk of so many bytes. It needs root. The disk is closed when t ends.
func NewDisk(t testing.TB, size int) *Disk {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "disk")
	Must(t, err)
	defer file.Close()
	_, err = file.Write(make([]byte, size))
	Must(t, err)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	Must(t, err)
	defer control.Close()
	for { // others take loop devices, too
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		Must(t, err)
		d := &Disk{Path: fmt.Sprintf("/dev/loop%d", n), t: t}
		// A host that has no udev has no node for a device that has just been made.
		const major = 7
		if err := unix.Mknod(d.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, uint32(n)))); err != unix.EEXIST {
			Must(t, err)
		}
		d.device, err = os.OpenFile(d.Path, os.O_RDWR, 0)
		Must(t, err)
		// The kernel releases the file when the last opener of the device closes it, also when this
		// process is killed.
		config := unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(d.device.Fd()), &config); err == nil {
			t.Cleanup(d.Close)
			return d
		}
		Must(t, d.device.Close())
		if !errors.Is(err, unix.EBUSY) {
			t.Fatalf("make loop device: %v", err)
		}
	}
}

// Close releases the disk, which ends when its last opener closes it.
func (d *Disk) Close() {
	if err := d.device.Close(); !errors.Is(err, os.ErrClosed) {
		Must(d.t, err)
	}
}
