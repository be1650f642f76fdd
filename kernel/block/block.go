// Package block finds the disks of this host in sysfs: which disk carries the requests,
// and so the knobs, of a device that somebody names, and whether what is on a device would
// be lost by writing to it. It changes nothing. Features, and what measures disks, use it.
package block

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoDevice is returned, wrapped, for a path or a number that is no block device here.
var ErrNoDevice = errors.New("no such block device")

// ErrNoRequests is returned, wrapped, for a device that passes what it is asked on, or
// serves it at once, and has no requests of its own that could be counted or held back:
// device mapper, md, zram.
var ErrNoRequests = errors.New("it has no requests of its own")

// Disk is a whole disk.
type Disk struct {
	Name         string // "vda"
	Major, Minor uint32
	Size         uint64 // bytes
	Model        string // model and serial number, as far as it tells them
	Scheduler    string // "none", "mq-deadline", "bfq"
	Loop         string // the file behind a loop device, else ""
}

// Number gives the form of the kernel's own files, as 254:0.
func (d Disk) Number() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Identity tells the disk from others, as far as it can, also after the next boot: by
// model, serial number and size, or by its name if it does not tell any.
func (d Disk) Identity() string {
	name := d.Model
	if name == "" {
		name = d.Name
	}
	return fmt.Sprintf("%s, %d bytes", name, d.Size)
}

// Open gives the disk of a device below /dev: of a partition, the disk that it is on. A
// loop device is a disk, whose requests are its own and those to its file not. Errors:
// ErrNoDevice and ErrNoRequests.
func Open(sys, path string) (Disk, error) {
	major, minor, err := number(path)
	if err != nil {
		return Disk{}, fmt.Errorf("%s: %w", path, err)
	}
	d, err := Find(sys, major, minor)
	if err != nil {
		return Disk{}, fmt.Errorf("%s: %w", path, err)
	}
	return d, nil
}

// number gives that of a block device's node; ErrNoDevice if it is none.
func number(path string) (major, minor uint32, err error) {
	var st unix.Stat_t
	err = unix.Stat(path, &st)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Mode&unix.S_IFMT != unix.S_IFBLK {
		err = ErrNoDevice
	}
	return unix.Major(st.Rdev), unix.Minor(st.Rdev), err
}

// Find is Open by the device's number.
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
	return read(dir)
}

// Disks lists the disks that have requests of their own, by name.
func Disks(sys string) (disks []Disk, err error) {
	entries, err := os.ReadDir(filepath.Join(sys, "block"))
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	for _, e := range entries {
		if dir, err := filepath.EvalSymlinks(filepath.Join(sys, "block", e.Name())); err == nil {
			if d, err := read(dir); err == nil { // else it has none, or has vanished
				disks = append(disks, d)
			}
		}
	}
	return disks, nil
}

func read(dir string) (Disk, error) {
	d := Disk{Name: filepath.Base(dir)}
	if _, err := fmt.Sscanf(text(dir, "dev"), "%d:%d", &d.Major, &d.Minor); err != nil {
		return Disk{}, fmt.Errorf("%s: %w", d.Name, ErrNoDevice)
	}
	if _, err := os.Stat(filepath.Join(dir, "mq")); err != nil {
		return Disk{}, fmt.Errorf("%s: %w: %s", d.Name, ErrNoRequests, composite(dir))
	}
	const sector = 512 // whatever the disk's own are
	sectors, _ := strconv.ParseUint(text(dir, "size"), 10, 54)
	d.Size = sectors * sector
	d.Model = strings.TrimSpace(text(dir, "device/model") + " " + text(dir, "device/serial") + text(dir, "serial"))
	d.Loop = text(dir, "loop/backing_file")
	d.Scheduler = chosen(text(dir, "queue/scheduler"))
	return d, nil
}

// composite says what a device without requests is, and what to name in its place.
func composite(dir string) string {
	what := "what it is asked it does at once"
	for sub, name := range map[string]string{"dm": "device mapper", "md": "an array of disks"} {
		if _, err := os.Stat(filepath.Join(dir, sub)); err == nil {
			what = name
		}
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

// chosen gives the scheduler in brackets: "none [mq-deadline] bfq".
func chosen(list string) string {
	_, rest, _ := strings.Cut(list, "[")
	name, _, _ := strings.Cut(rest, "]")
	return name
}

// maxText bounds what is read of a file in sysfs, which gives a page at the most.
const maxText = 4096

// text reads a file of sysfs; "" if it is not there.
func text(dir, name string) string {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data[:min(len(data), maxText)]))
}
