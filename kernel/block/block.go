// Package block finds the disks of this host in sysfs: the disk that serves a device's requests,
// and so has the knobs for it. It also checks whether writing to a device would destroy data. It
// changes nothing. The features and the programs that measure disks use it.
package block

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoDevice is returned, wrapped, for a path or a number that is no block device here.
var ErrNoDevice = errors.New("no such block device")

// ErrNoRequests is returned, wrapped, for a device that forwards its I/O or serves it at once, and
// so has no requests of its own to count or throttle: device mapper, md, zram.
var ErrNoRequests = errors.New("it has no requests of its own")

// Disk is a whole disk.
type Disk struct {
	Name         string // "vda"
	Major, Minor uint32
	Size         uint64 // bytes
	Model        string // model and serial number, as far as the disk reports them
	Unique       string // distinguishes it from others of its model, for people: "wwid ...", "serial ...", "file ..." or "at ..."
	Sequence     uint64 // diskseq, unique to this disk within this boot
	Scheduler    string // "none", "mq-deadline", "bfq"
	Loop         string // the backing file of a loop device, else ""
}

// Number returns MAJ:MIN, as in the kernel's own files: 254:0.
func (d Disk) Number() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Identity returns a text that distinguishes the disk from others, as far as possible, even after a
// reboot: its model and size, and its WWID or serial number, or else the place where it is
// attached. In the last case, another disk of this model and size in that place has the same
// identity; only its Sequence differs.
func (d Disk) Identity() string {
	return strings.TrimPrefix(fmt.Sprintf("%s, %s, %d bytes", d.Model, d.Unique, d.Size), ", ")
}

// Open returns the disk of a device node below /dev, on the same file system. For a partition, it
// returns the whole disk. A loop device is a disk: its own requests count, and those to its backing
// file do not. Errors: ErrNoDevice and ErrNoRequests.
func Open(sys, node string) (Disk, error) {
	major, minor, err := number(node)
	if err != nil {
		return Disk{}, fmt.Errorf("%s: %w", node, err)
	}
	d, err := Find(sys, major, minor)
	if err != nil {
		return Disk{}, fmt.Errorf("%s: %w", node, err)
	}
	return d, nil
}

// number returns the device number of a block device's node, or ErrNoDevice if it is none. The path
// may come from the owner of a container. So it must stay below /dev, and outside file systems
// mounted there: a user may mount a FUSE file system below /dev/shm that never answers.
func number(node string) (major, minor uint32, err error) {
	dev, err := unix.Open("/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(dev)
	for range maxLinks {
		below, ok := strings.CutPrefix(node, "/dev/")
		if !ok {
			return 0, 0, ErrNoDevice
		}
		st, link, err := look(dev, below)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ELOOP) {
			err = ErrNoDevice
		}
		switch {
		case err != nil:
			return 0, 0, err
		case path.IsAbs(link):
			node = path.Clean(link)
		case link != "":
			node = path.Join(path.Dir(node), link)
		case st.Mode&unix.S_IFMT != unix.S_IFBLK:
			return 0, 0, ErrNoDevice
		default:
			return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
		}
	}
	return 0, 0, ErrNoDevice
}

// maxLinks bounds the symbolic links to a node. It is the kernel's own bound.
const maxLinks = 40

// look returns the stat of a path below a directory, in the same file system, and the target if it
// is a symbolic link.
func look(dir int, below string) (st unix.Stat_t, link string, err error) {
	fd, err := unix.Openat2(dir, below, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return st, "", err
	}
	defer unix.Close(fd)
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		to := make([]byte, maxText)
		var n int
		n, err = unix.Readlinkat(fd, "", to)
		link = string(to[:max(n, 0)])
	}
	return st, link, err
}

// Find is Open by device number.
func Find(sys string, major, minor uint32) (Disk, error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev/block", fmt.Sprintf("%d:%d", major, minor)))
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNoDevice
	}
	if err != nil {
		return Disk{}, err
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dir = filepath.Dir(dir)
	}
	return read(sys, dir)
}

// Disks returns the disks that have requests of their own, by name.
func Disks(sys string) (disks []Disk, err error) {
	entries, err := os.ReadDir(filepath.Join(sys, "block"))
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	for _, e := range entries {
		if dir, err := filepath.EvalSymlinks(filepath.Join(sys, "block", e.Name())); err == nil {
			if d, err := read(sys, dir); err == nil { // else it has no requests, or has vanished
				disks = append(disks, d)
			}
		}
	}
	return disks, nil
}

func read(sys, dir string) (Disk, error) {
	d := Disk{Name: filepath.Base(dir)}
	if _, err := fmt.Sscanf(text(dir, "dev"), "%d:%d", &d.Major, &d.Minor); err != nil {
		return Disk{}, fmt.Errorf("%s: %w", d.Name, ErrNoDevice)
	}
	if _, err := os.Stat(filepath.Join(dir, "mq")); err != nil {
		return Disk{}, fmt.Errorf("%s: %w: %s", d.Name, ErrNoRequests, composite(dir))
	}
	const sector = 512 // whatever the sector size of the disk
	sectors, _ := strconv.ParseUint(text(dir, "size"), 10, 54)
	d.Size = sectors * sector
	d.Model = strings.TrimSpace(text(dir, "device/model") + " " + text(dir, "device/serial") + text(dir, "serial"))
	d.Loop = text(dir, "loop/backing_file")
	d.Unique = unique(sys, dir, d)
	d.Sequence, _ = strconv.ParseUint(text(dir, "diskseq"), 10, 64)
	d.Scheduler = chosen(text(dir, "queue/scheduler"))
	return d, nil
}

// composite explains what a device without requests is, and which device to name in its place.
func composite(dir string) string {
	what := "what it is asked it does at once"
	for sub, name := range map[string]string{"dm": "device mapper", "md": "an array of disks"} {
		if _, err := os.Stat(filepath.Join(dir, sub)); err == nil {
			what = name
		}
	}
	if text(filepath.Dir(dir), "subsysnqn") != "" { // else it lies below its controller
		what = "a disk of NVMe that may have several paths, each with requests of its own; start the kernel with nvme_core.multipath=N"
	}
	var below []string
	entries, _ := os.ReadDir(filepath.Join(dir, "slaves"))
	for _, e := range entries {
		below = append(below, "/dev/"+e.Name())
	}
	if below != nil {
		what += " on " + strings.Join(below, ", ")
	}
	return what
}

// chosen returns the scheduler in brackets: "none [mq-deadline] bfq".
func chosen(list string) string {
	_, rest, _ := strings.Cut(list, "[")
	name, _, _ := strings.Cut(rest, "]")
	return name
}

// maxText bounds how much of a sysfs file is read. sysfs returns one page at the most.
const maxText = 4096

// text returns the text of a sysfs file, or "" if there is none.
func text(dir, name string) string {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data[:min(len(data), maxText)]))
}
