package block

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func testDisk(t *testing.T) string {
	t.Helper()
	testkit.NeedRoot(t)
	return testkit.NewDisk(t, 1<<20).Path
}

func mustRefuse(t *testing.T, path, why string) {
	t.Helper()
	f, err := Claim("/proc", "/sys", path)
	if err == nil {
		f.Close()
	}
	if !errors.Is(err, errOccupied) || !strings.Contains(err.Error(), why) {
		t.Errorf("claim %s: %v, want %q", path, err, why)
	}
}

// Claim refuses a mounted device and names the mount point. After the unmount it refuses the file
// system that is still there.
func TestClaimMounted(t *testing.T) {
	path, dir := testDisk(t), t.TempDir()
	if out, err := exec.Command("mkfs.ext4", "-q", "-O", "^has_journal", path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mustRefuse(t, path, "signature of an ext2, ext3 or ext4 file system (`wipefs --all "+path)
	must(t, unix.Mount(path, dir, "ext4", 0, ""))
	mustRefuse(t, path, path+" is mounted at "+dir)
	must(t, unix.Unmount(dir, 0))
}

// A claim is exclusive, also within one process, and ends when the file is closed.
func TestClaimHeld(t *testing.T) {
	path := testDisk(t)
	f, err := Claim("/proc", "/sys", path)
	must(t, err)
	mustRefuse(t, path, "another program holds it")
	testkit.Is(t, "what is claimed is not occupied", Vacant("/proc", "/sys", path), nil)
	must(t, f.Close())
	if f, err = Claim("/proc", "/sys", path); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, none := range []string{"/dev/null", "/dev/fl-none", t.TempDir()} {
		if f, err := Claim("/proc", "/sys", none); err == nil {
			f.Close()
			t.Errorf("%s was claimed", none)
		}
	}
}

func TestClaimSigned(t *testing.T) {
	path := testDisk(t)
	for what, at := range map[string]map[int64]string{
		"a GPT partition table": {512: "EFI PART"}, "partition table": {510: "\x55\xaa"}, "LVM": {512: "LABELONE"}, "LUKS": {0: "LUKS\xba\xbe"}, "RAID": {4096: "\xfc\x4e\x2b\xa9"},
		"RAID member (md)": {1<<20 - 64<<10: "\xfc\x4e\x2b\xa9"}, "XFS": {0: "XFSB"}, "Btrfs": {0x10040: "_BHRfS_M"}, "swap": {4086: "SWAPSPACE2"}, "ZFS": {140 << 10: "\x0c\xb1\xba\x00"},
		"(md)": {1<<20 - 8<<10: "\xfc\x4e\x2b\xa9"}, "BlueStore": {0: "bluestore block device"},
	} {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must(t, err)
		for offset, magic := range at {
			must(t, testkit.Err(f.WriteAt([]byte(magic), offset)))
			mustRefuse(t, path, what)
			must(t, testkit.Err(f.WriteAt(make([]byte, len(magic)), offset)))
		}
		must(t, f.Close())
	}
	testkit.Is(t, "without any of them", Vacant("/proc", "/sys", path), nil)
}

// The partitions of a disk hold it, and so do the devices built on them. A partition is held
// through its disk. A mount on any of them is a mount on the disk.
func TestRelated(t *testing.T) {
	sys := testkit.Tree(t, map[string]string{
		"dev/block/8:0": "->block/sda", "dev/block/8:1": "->block/sda/sda1",
		"block/sda/dev": "8:0\n", "block/sda/sda1/dev": "8:1\n", "block/sda/sda1/partition": "1\n", "block/sda/sda2/dev": "8:2\n", "block/sda/sda2/partition": "2\n",
		"block/sda/sda1/holders/dm-0": "", "block/sda/sda2/holders/md0": "", "block/dm-0/dev": "253:0\n", "block/dm-0/dm/name": "vg-root\n", "block/dm-0/holders/dm-1": "",
		"block/dm-1/dev": "253:1\n", "block/dm-1/dm/name": "crypt\n", "block/md0/dev": "9:0\n",
	})
	for minor, want := range map[uint32]string{
		0: "[/dev/sda /dev/sda1 /dev/sda2 /dev/dm-0 /dev/md0 /dev/dm-1] [/dev/sda1 is part of /dev/mapper/vg-root /dev/sda2 is part of /dev/md0 /dev/dm-0 is part of /dev/mapper/crypt]",
		1: "[/dev/sda1 /dev/sda /dev/dm-0 /dev/dm-1] [/dev/sda1 is part of /dev/mapper/vg-root /dev/dm-0 is part of /dev/mapper/crypt]",
	} {
		parts, held, err := related(sys, 8, minor)
		if got := fmt.Sprint(parts, " ", held); err != nil || got != want {
			t.Errorf("8:%d: %s, %v, want %s", minor, got, err, want)
		}
	}
	proc := testkit.Tree(t, map[string]string{"7/mountinfo": "1 0 8:1 / /boot rw - vfat /dev/sda1 rw\n1 0 253:1 / / rw - ext4 /dev/mapper/crypt rw\n1 0 8:3 / /x rw - ext4 /dev/sda3 rw\n1 0 0:5 / /proc rw - proc proc rw\n"})
	mounts, err := Disk{Name: "sda", Major: 8}.Mounts(proc, sys, "7")
	if err != nil || len(mounts) != 2 || mounts[0].Dir != "/boot" || mounts[1].Dir != "/" {
		t.Errorf("mounts %+v, %v", mounts, err)
	}
	testkit.Is(t, "of no process", testkit.Err((Disk{Name: "sda", Major: 8}).Mounts(proc, sys, "8")), fs.ErrNotExist)
}
