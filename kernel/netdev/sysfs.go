package netdev

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Sysfs runs fn inside the namespace with the root of a sysfs that shows this namespace's devices.
// The sysfs is mounted nowhere: it exists as a file descriptor while fn runs, so no mount table
// changes.
//
// A namespace has one sysfs superblock, which all its mounts share, and container runtimes make it
// read-only. With write, it is made writable while fn runs; the container's own mount stays
// read-only throughout. There is no lock on that: writers go through the journal, which makes one
// call at a time in one namespace (journal.Ref), and readers change nothing.
func (ns *NS) Sysfs(write bool, fn func(root *os.Root) error) error {
	return ns.mountSysfs(func(mnt int, protected bool) (err error) {
		if write && protected {
			if err := remount(mnt, writable); err != nil {
				return fmt.Errorf("make sysfs of netns %d writable: %w", ns.inode, err)
			}
			defer func() {
				if rerr := protect(mnt); rerr != nil {
					err = errors.Join(err, fmt.Errorf("make sysfs of netns %d read-only again: %w", ns.inode, rerr))
				}
			}()
		}
		// os.Root wants a path; this one leads to our descriptor and to nothing that a container
		// could have put in its place.
		root, err := os.OpenRoot(fmt.Sprintf("/proc/thread-self/fd/%d", mnt))
		if err != nil {
			return fmt.Errorf("open sysfs of netns %d: %w", ns.inode, err)
		}
		defer root.Close()
		return fn(root)
	})
}

// mountSysfs runs fn inside the namespace with a mount of its sysfs that only a file descriptor
// refers to. protected: its superblock is read-only.
func (ns *NS) mountSysfs(fn func(mnt int, protected bool) error) error {
	return ns.Do(func() error {
		ctx, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return fmt.Errorf("open sysfs of netns %d: %w", ns.inode, err)
		}
		defer unix.Close(ctx)
		if err := uninterrupted(func() error { return unix.FsconfigCreate(ctx) }); err != nil {
			return fmt.Errorf("open sysfs of netns %d: %w", ns.inode, err)
		}
		mnt := -1
		if err := uninterrupted(func() (err error) {
			mnt, err = unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_NOATIME)
			return err
		}); err != nil {
			return fmt.Errorf("mount sysfs of netns %d: %w", ns.inode, err)
		}
		defer unix.Close(mnt)
		var st unix.Statfs_t
		if err := uninterrupted(func() error { return unix.Fstatfs(mnt, &st) }); err != nil {
			return fmt.Errorf("stat sysfs of netns %d: %w", ns.inode, err)
		}
		return fn(mnt, st.Flags&unix.ST_RDONLY != 0)
	})
}

// Values of a sysfs superblock.
const (
	readOnly = "ro"
	writable = "rw"
)

// superblock is the knob of a namespace's sysfs: read-only or writable. Only a write of an
// attribute turns it; see journal.Exposing.
type superblock struct{ ns *NS }

func (s superblock) Ref() journal.Ref { return deviceRef(KindSysfs, s.ns, 0, "superblock") }

func (s superblock) Read() (value string, err error) {
	err = s.ns.mountSysfs(func(_ int, protected bool) error {
		if value = writable; protected {
			value = readOnly
		}
		return nil
	})
	return value, err
}

func (s superblock) Write(value string) error {
	return s.ns.mountSysfs(func(mnt int, _ bool) error {
		if value == readOnly {
			return protect(mnt)
		}
		return remount(mnt, value)
	})
}

// protect makes the superblock below mnt read-only again. The kernel refuses that while a file is
// open for writing. For a moment that includes readers through a mount that records access times,
// which the container may make.
func protect(mnt int) error {
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if err := remount(mnt, readOnly); err != unix.EBUSY || time.Now().After(end) {
			return err
		}
	}
}

// remount sets one flag, "ro" or "rw", on the superblock below mnt.
func remount(mnt int, flag string) error {
	ctx, err := unix.Fspick(mnt, "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(ctx)
	if err := uninterrupted(func() error { return unix.FsconfigSetFlag(ctx, flag) }); err != nil {
		return err
	}
	return uninterrupted(func() error { return unix.FsconfigReconfigure(ctx) })
}

// uninterrupted repeats a call that a signal has interrupted; the Go runtime sends signals to its
// threads. fs/fsopen.c waits for a lock interruptibly, and has then changed nothing.
func uninterrupted(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// attribute is one file below class/net/DEVICE, whose entries are links to the device's directory
// elsewhere in sysfs.
type attribute struct {
	ns    *NS
	index int
	file  string // "threaded", "queues/rx-0/rps_cpus"
}

func (a attribute) read() (value string, err error) {
	err = a.open(os.O_RDONLY, func(f *os.File) error {
		b, err := io.ReadAll(io.LimitReader(f, 4096))
		value = strings.TrimSpace(string(b))
		return err
	})
	return value, a.wrap("read", err)
}

func (a attribute) write(value string) error {
	return a.wrap("write", a.open(os.O_WRONLY, func(f *os.File) error {
		_, err := f.WriteString(value)
		return err
	}))
}

// open opens the file for fn, by the name that the device has at present: containers may rename
// their devices, the index stays.
func (a attribute) open(flag int, fn func(*os.File) error) error {
	link, err := a.ns.Link(a.index)
	if err != nil {
		return err
	}
	return a.ns.Sysfs(flag == os.O_WRONLY, func(root *os.Root) error {
		f, err := root.OpenFile(path.Join("class/net", link.Name, a.file), flag, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		return fn(f)
	})
}

func (a attribute) wrap(verb string, err error) error {
	if err == nil {
		return nil
	}
	// ENODEV: the device went while its file was open. ENOENT may also mean a kernel without the
	// attribute, which Support has ruled out before. EOPNOTSUPP: a device that is about to go has
	// lost its NAPI, and so its thread.
	if errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrNoLink) ||
		errors.Is(err, unix.EOPNOTSUPP) && !a.up() {
		err = errors.Join(journal.ErrGone, err)
	}
	return fmt.Errorf("%s %s of device %d in netns %d: %w", verb, a.file, a.index, a.ns.inode, err)
}

// up reports whether the device is there, and in operation.
func (a attribute) up() bool {
	link, err := a.ns.Link(a.index)
	return err == nil && link.Up
}
