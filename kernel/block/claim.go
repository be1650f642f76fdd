package block

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/mountinfo"
)

// errOccupied is returned, wrapped, for a device that must not be written to: it is in use, or may
// hold data. The text gives the reason.
var errOccupied = errors.New("writing to it would destroy data")

// Claim opens a disk or a partition in order to overwrite it. The claim is exclusive until the
// caller closes the file: the kernel then refuses to mount the device, to swap to it, or to make it
// part of an array. Claim refuses an occupied device with errOccupied.
func Claim(proc, sys, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_EXCL, 0)
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return nil, err
	}
	busy := err != nil
	switch err = Vacant(proc, sys, path); {
	case err == nil && busy:
		err = fmt.Errorf("%s: %w: the kernel or another program holds it; it may be mounted in another mount namespace", path, errOccupied)
	case err == nil:
		return f, nil
	}
	if !busy {
		err = errors.Join(err, f.Close())
	}
	return nil, err
}

// Vacant returns errOccupied with the reason if a device must not be written to: it or a partition
// of it is mounted, is swap, or is part of another device, or it has the signature of a file
// system, a partition table or the like. Any other error is one of reading.
func Vacant(proc, sys, path string) error {
	major, minor, err := number(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	parts, reasons, err := related(sys, major, minor)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, list := range []func(string, []part) ([]string, error){mounted, swapped} {
		more, err := list(proc, parts)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		reasons = append(reasons, more...)
	}
	signature, err := signatureOf(path)
	if err != nil {
		return err
	}
	if signature != "" {
		reasons = append(reasons, fmt.Sprintf("it has the signature of %s (`wipefs --all %s` removes it if nothing there is needed)", signature, path))
	}
	if len(reasons) > 0 {
		return fmt.Errorf("%s: %w: %s", path, errOccupied, strings.Join(reasons, "; "))
	}
	return nil
}

// part is a device that shares sectors with another one.
type part struct {
	dir    string // in sysfs
	number string // 8:1
}

func (p part) String() string { return "/dev/" + filepath.Base(p.dir) }

// is reports whether a path is the device's node.
func (p part) is(path string) bool {
	major, minor, err := number(path)
	return err == nil && p.number == fmt.Sprintf("%d:%d", major, minor)
}

// related returns a device and all devices that share sectors with it: the partitions of a disk,
// the disk of a partition, and the devices built on any of them. held describes the latter.
func related(sys string, major, minor uint32) (parts []part, held []string, err error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev/block", fmt.Sprintf("%d:%d", major, minor)))
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNoDevice
	}
	if err != nil {
		return nil, nil, err
	}
	dirs := []string{dir}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dirs = append(dirs, filepath.Dir(dir))
	} else {
		partitions, _ := filepath.Glob(filepath.Join(dir, "*", "partition"))
		for _, p := range partitions {
			dirs = append(dirs, filepath.Dir(p))
		}
	}
	for i := 0; i < len(dirs); i++ {
		p := part{dirs[i], text(dirs[i], "dev")}
		parts = append(parts, p)
		holders, _ := os.ReadDir(filepath.Join(p.dir, "holders"))
		for _, h := range holders {
			name, above := "/dev/"+h.Name(), filepath.Join(sys, "block", h.Name())
			if mapped := text(above, "dm/name"); mapped != "" {
				name = "/dev/mapper/" + mapped
			}
			held = append(held, fmt.Sprintf("%s is part of %s", p, name))
			if !slices.Contains(dirs, above) {
				dirs = append(dirs, above)
			}
		}
	}
	return parts, held, nil
}

// mounted returns where the parts are mounted, in the mount namespaces of this process and of the
// host's init.
func mounted(proc string, parts []part) (reasons []string, err error) {
	for _, pid := range []string{"self", "1"} {
		err := eachMount(proc, pid, parts, func(p part, m mountinfo.Mount) {
			if reason := fmt.Sprintf("%s is mounted at %s", p, m.Dir); !slices.Contains(reasons, reason) {
				reasons = append(reasons, reason)
			}
		})
		if err != nil && pid == "self" {
			return nil, err // some processes cannot see init's mounts
		}
	}
	return reasons, nil
}

// Mounts returns the mounts of a process that are on a disk, on its partitions, or on devices built
// on these (LVM, RAID). The error matches fs.ErrNotExist if there is no such process.
func (d Disk) Mounts(proc, sys, pid string) (mounts []mountinfo.Mount, err error) {
	parts, _, err := related(sys, d.Major, d.Minor)
	if err == nil {
		err = eachMount(proc, pid, parts, func(_ part, m mountinfo.Mount) { mounts = append(mounts, m) })
	}
	if err != nil && !errors.Is(err, mountinfo.ErrLong) {
		return nil, fmt.Errorf("mounts of %s: %w", d.Name, err)
	}
	return mounts, nil
}

func eachMount(proc, pid string, parts []part, each func(part, mountinfo.Mount)) error {
	return mountinfo.Read(proc, pid, func(m mountinfo.Mount) bool {
		for _, p := range parts {
			// Btrfs mounts have another device number, and name the device.
			if m.Device == p.number || m.Type == "btrfs" && strings.HasPrefix(m.Source, "/dev/") && p.is(m.Source) {
				each(p, m)
			}
		}
		return true
	})
}

// swapped returns which of the parts are swap.
func swapped(proc string, parts []part) (reasons []string, err error) {
	table, err := os.ReadFile(filepath.Join(proc, "swaps"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without swap has none
		return nil, err
	}
	for l := range strings.Lines(string(table)) {
		path, _, _ := strings.Cut(l, " ")
		for _, p := range parts {
			if p.is(path) {
				reasons = append(reasons, fmt.Sprintf("%s is swap", p))
			}
		}
	}
	return reasons, nil
}

// signatures lists the signatures of the formats that container hosts have on their disks, as
// libblkid finds them. The default offset is 0.
var signatures = []struct {
	name, magic string
	at          []int
}{
	{"a GPT partition table", "EFI PART", []int{512, 4096}},
	{"a partition table or a FAT file system", "\x55\xaa", []int{510}},
	{"an LVM physical volume", "LABELONE", []int{0, 512, 1024, 1536}},
	{"a RAID member (md)", "\xfc\x4e\x2b\xa9", []int{0, 4096}},
	{"an encrypted volume (LUKS)", "LUKS\xba\xbe", []int{0}},
	{"an ext2, ext3 or ext4 file system", "\x53\xef", []int{1080}},
	{"an XFS file system", "XFSB", []int{0}},
	{"a Btrfs file system", "_BHRfS_M", []int{0x10040}},
	{"an F2FS file system", "\x10\x20\xf5\xf2", []int{1024}},
	{"an EROFS file system", "\xe2\xe1\xf5\xe0", []int{1024}},
	{"a bcache or bcachefs device", "\xc6\x85\x73\xf6", []int{4096 + 24}},
	{"a ReiserFS file system", "ReIsEr", []int{0x2034, 0x10034}},
	{"a JFS file system", "JFS1", []int{0x8000}},
	{"a GFS2 file system", "\x01\x16\x19\x70", []int{0x10000}},
	{"a squashfs file system", "hsqs", []int{0}},
	{"an NTFS file system", "NTFS    ", []int{3}},
	{"an exFAT file system", "EXFAT   ", []int{3}},
	{"an ISO 9660 file system", "CD001", []int{0x8001}},
	{"swap", "SWAPSPACE2", []int{4086, 8182, 16374, 32758, 65526}},
	{"swap with a suspended system", "S1SUSPEND", []int{4086, 8182, 16374, 32758, 65526}},
	{"a Ceph OSD (BlueStore)", "bluestore block device", []int{0}},
	{"an Oracle ASM disk", "ORCLDISK", []int{32}},
	{"a VDO volume", "dmvdo001", []int{0}},
	{"a Stratis pool", "!Stra0tis", []int{516}},
}

// signatureOf names the format of a device's contents, or "" if it recognises none.
func signatureOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	size, err := f.Seek(0, 2)
	if err != nil {
		return "", fmt.Errorf("length of %s: %w", path, err)
	}
	head := make([]byte, min(256<<10, size))
	if _, err := f.ReadAt(head, 0); err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	if name := signatureIn(head); name != "" {
		return name, nil
	}
	// md has two formats with the superblock at the end: versions 1.0 and 0.90.
	const sector, reserved = 512, 64 << 10
	for _, at := range []int64{(size/sector - 16) &^ 7 * sector, size&^(reserved-1) - reserved} {
		tail := make([]byte, 4)
		if at < 0 {
			continue
		}
		if _, err := f.ReadAt(tail, at); err != nil {
			return "", fmt.Errorf("read %s: %w", path, err)
		}
		if string(tail) == "\xfc\x4e\x2b\xa9" {
			return "a RAID member (md)", nil
		}
	}
	return "", nil
}

func signatureIn(head []byte) string {
	for _, s := range signatures {
		for _, at := range s.at {
			if at < len(head) && bytes.HasPrefix(head[at:], []byte(s.magic)) {
				return s.name
			}
		}
	}
	// ZFS has a ring of uberblocks, and may write any of them first.
	for at := 128 << 10; at < len(head); at += 1 << 10 {
		if bytes.HasPrefix(head[at:], []byte("\x0c\xb1\xba\x00")) || bytes.HasPrefix(head[at:], []byte("\x00\x00\x00\x00\x00\xba\xb1\x0c")) {
			return "a ZFS pool"
		}
	}
	return ""
}
