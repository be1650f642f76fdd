package block

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func TestFind(t *testing.T) {
	sys := testkit.Tree(t, map[string]string{
		"dev/block/8:0": "->devices/sda", "dev/block/8:1": "->devices/sda/sda1", "dev/block/253:0": "->devices/dm-0", "dev/block/251:0": "->devices/zram0",
		"devices/sda/dev": "8:0\n", "devices/sda/size": "2048\n", "devices/sda/mq/0/x": "", "devices/sda/queue/scheduler": "none [bfq] kyber\n",
		"devices/sda/device/model": "DISK \n", "devices/sda/device/serial": "S1\n", "devices/sda/diskseq": "9\n",
		"devices/sda/sda1/partition": "1\n", "devices/sda/sda1/dev": "8:1\n",
		"devices/dm-0/dev": "253:0\n", "devices/dm-0/dm/name": "x\n", "devices/dm-0/slaves/sda1": "",
		"devices/zram0/dev": "251:0\n",
	})
	for _, d := range []string{"sda", "dm-0", "zram0"} {
		must(t, errors.Join(os.MkdirAll(filepath.Join(sys, "block"), 0o755), os.Symlink(filepath.Join(sys, "devices", d), filepath.Join(sys, "block", d))))
	}
	want := Disk{Name: "sda", Major: 8, Size: 1 << 20, Model: "DISK S1", Unique: "serial S1", Sequence: 9, Scheduler: "bfq"}
	for _, minor := range []uint32{0, 1} {
		testkit.Gives(t, fmt.Sprintf("8:%d", minor), want)(Find(sys, 8, minor))
	}
	if all, err := Disks(sys); err != nil || len(all) != 1 || all[0] != want {
		t.Errorf("disks %+v, %v, want %+v alone", all, err, want)
	}
	testkit.Same(t, "identity", "DISK S1, serial S1, 1048576 bytes", want.Identity())
	if _, err := Find(sys, 253, 0); !errors.Is(err, ErrNoRequests) || !strings.HasSuffix(err.Error(), "device mapper on /dev/sda1") {
		t.Errorf("device mapper: %v", err)
	}
	testkit.Is(t, "zram", testkit.Err(Find(sys, 251, 0)), ErrNoRequests)
	testkit.Is(t, "unknown", testkit.Err(Find(sys, 9, 9)), ErrNoDevice)
	for _, path := range []string{filepath.Join(sys, "none"), filepath.Join(sys, "devices/sda/dev"), sys, "/dev/null"} {
		testkit.Is(t, path, testkit.Err(Open(sys, path)), ErrNoDevice)
	}
}

func TestOpenInKernel(t *testing.T) {
	testkit.NeedRoot(t)
	l := testkit.NewDisk(t, 1<<20)
	d, err := Open("/sys", l.Path)
	if err != nil || "/dev/"+d.Name != l.Path || d.Size != 1<<20 || d.Loop == "" || d.Scheduler == "" {
		t.Errorf("%+v, %v, of %s", d, err, l.Path)
	}
	for name, to := range map[string]string{"a": l.Path, "b": d.Name} { // absolute and relative
		link := filepath.Join("/dev", filepath.Base(filepath.Dir(t.TempDir()))+"-"+name)
		must(t, os.Symlink(to, link))
		testkit.Gives(t, "by a link to "+to, d)(Open("/sys", link))
		must(t, os.Remove(link))
	}
	// Any user may make files, links and mounts on a file system below /dev.
	stranger := filepath.Join("/dev/shm", filepath.Base(filepath.Dir(t.TempDir()))+"-block")
	must(t, os.Symlink(l.Path, stranger))
	testkit.Is(t, "through another file system", testkit.Err(Open("/sys", stranger)), ErrNoDevice)
	must(t, os.Remove(stranger))
}

// Identity distinguishes disks of one model and size by WWID or serial number, or else by the place
// where they are attached, however the kernel numbered the path to it.
func TestIdentity(t *testing.T) {
	const pci = "pci0000:00/0000:00:1f.2/"
	page := func(serial string) string { return string([]byte{0, 0x80, 0, byte(len(serial))}) + serial }
	all := []struct {
		dir  string // below devices
		with map[string]string
		id   string
	}{
		{pci + "ata1/host0/target0:0:0/0:0:0:0/block/sda", map[string]string{"device/model": "DISK", "device/wwid": "naa.5000c500a\n", "device/vpd_pg80": page("S1")}, "DISK, wwid naa.5000c500a"},
		{pci + "ata2/host1/target1:0:0/1:0:0:0/block/sdb", map[string]string{"device/model": "DISK", "device/vpd_pg80": page("  S2 ")}, "DISK, serial S2"},
		{pci + "ata3/host2/target2:0:0/2:0:0:0/block/sdc", map[string]string{"device/model": "DISK", "device/vpd_pg80": page("0000")}, "DISK, at " + pci + "port2/host+0/0:0:0"},
		{"pci0000:00/0000:00:05.0/host9/target9:0:0/9:0:0:1/block/sdd", map[string]string{"device/model": "QEMU HARDDISK"}, "QEMU HARDDISK, at pci0000:00/0000:00:05.0/host+0/0:0:1"},
		{"pci0000:00/0000:00:05.0/host10/target10:0:0/10:0:0:1/block/sde", map[string]string{"device/model": "QEMU HARDDISK"}, "QEMU HARDDISK, at pci0000:00/0000:00:05.0/host+1/0:0:1"},
		{"pci0000:00/0000:00:06.0/virtio3/block/vda", map[string]string{"serial": "root\n"}, "root, serial root"},
		{"pci0000:00/0000:00:07.0/virtio4/block/vdb", map[string]string{"serial": "\n"}, "at pci0000:00/0000:00:07.0"},
		{"pci0000:00/0000:00:08.0/nvme/nvme1/nvme1n2", map[string]string{"device/model": "FAST", "device/serial": "N1", "wwid": "eui.00a"}, "FAST N1, wwid eui.00a"},
		{"pci0000:00/0000:00:09.0/nvme/nvme2/nvme2n1", map[string]string{"device/model": "FAST"}, "FAST, at pci0000:00/0000:00:09.0/namespace1"},
		{"virtual/block/loop0", map[string]string{"loop/backing_file": "/var/img\n"}, "file /var/img"},
		{"virtual/block/nbd0", nil, "at virtual/nbd0"},
	}
	files := map[string]string{"devices/" + pci + "ata3/ata_port/ata3/port_no": "2\n"}
	for i, x := range all {
		dir := "devices/" + x.dir
		files[dir+"/dev"], files[dir+"/size"], files[dir+"/mq/0/x"] = fmt.Sprintf("%d:0\n", i+1), "2048\n", ""
		for name, text := range x.with {
			files[dir+"/"+name] = text
		}
		files[fmt.Sprintf("dev/block/%d:0", i+1)] = "->" + dir
	}
	sys := testkit.Tree(t, files)
	for i, x := range all {
		if d, err := Find(sys, uint32(i+1), 0); err != nil || d.Identity() != x.id+", 1048576 bytes" {
			t.Errorf("%s: %q, %v, want %q", x.dir, d.Identity(), err, x.id)
		}
	}
}
