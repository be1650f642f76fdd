package testkit

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Disk is a loop device over a scratch file.
type Disk struct {
	Path string // "/dev/loop0"

	t      testing.TB
	device *os.File
}

// NewDisk makes a disk of size bytes. It needs root. The disk is closed when t ends.
func NewDisk(t testing.TB, size int) *Disk {
	t.Helper()
	return newDisk(t, size, unix.LO_FLAGS_AUTOCLEAR)
}

// scratch makes the file behind a disk.
func scratch(t testing.TB, size int) *os.File {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "disk")
	Must(t, err)
	Must(t, file.Truncate(int64(size)))
	return file
}

// NewFixedDisk makes a read-only disk that can have a partition.
func NewFixedDisk(t testing.TB, size int) *Disk {
	t.Helper()
	return newDisk(t, size, unix.LO_FLAGS_AUTOCLEAR|unix.LO_FLAGS_READ_ONLY|unix.LO_FLAGS_PARTSCAN)
}

const loopChangeFD = 0x4c06 // LOOP_CHANGE_FD, include/uapi/linux/loop.h

// Replace puts another file behind a fixed disk. The result is another disk with the same number.
func (d *Disk) Replace(size int) {
	d.t.Helper()
	file := scratch(d.t, size)
	defer file.Close()
	Must(d.t, unix.IoctlSetInt(int(d.device.Fd()), loopChangeFD, int(file.Fd())))
}

// Partition tells the kernel of one partition of a fixed disk, Path and "p1", or of none, as when
// it reads a partition table.
func (d *Disk) Partition(there bool) {
	d.t.Helper()
	part := unix.BlkpgPartition{Start: 1 << 20, Length: 1 << 20, Pno: 1}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_DEL_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	if there {
		arg.Op = unix.BLKPG_ADD_PARTITION
	}
	_, _, err := unix.Syscall(unix.SYS_IOCTL, d.device.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg)))
	if err != 0 {
		d.t.Fatalf("partition of %s: %v", d.Path, err)
	}
}

func newDisk(t testing.TB, size int, flags uint32) *Disk {
	t.Helper()
	file := scratch(t, size)
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	Must(t, err)
	defer control.Close()
	for { // other processes take loop devices, too
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		Must(t, err)
		d := &Disk{Path: fmt.Sprintf("/dev/loop%d", n), t: t}
		// A host without udev has no node for a new device.
		const major = 7
		if err := unix.Mknod(d.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, uint32(n)))); err != unix.EEXIST {
			Must(t, err)
		}
		d.device, err = os.OpenFile(d.Path, os.O_RDWR, 0)
		Must(t, err)
		// The kernel releases the file when the last opener closes the device, even if this process
		// is killed.
		config := unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: flags}}
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

// Close releases the disk. It ends when its last opener closes it.
func (d *Disk) Close() {
	if err := d.device.Close(); !errors.Is(err, os.ErrClosed) {
		Must(d.t, err)
	}
}
