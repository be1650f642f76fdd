package block

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/sandbox/loop"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// tree makes a sysfs of files, and of links that begin with ->.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	sys := t.TempDir()
	for name, text := range files {
		path := filepath.Join(sys, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, link := strings.CutPrefix(text, "->"); link {
			err = os.Symlink(filepath.Join(sys, to), path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return sys
}

func TestFind(t *testing.T) {
	sys := tree(t, map[string]string{
		"dev/block/8:0": "->devices/sda", "dev/block/8:1": "->devices/sda/sda1", "dev/block/253:0": "->devices/dm-0", "dev/block/251:0": "->devices/zram0",
		"devices/sda/dev": "8:0\n", "devices/sda/size": "2048\n", "devices/sda/mq/0/x": "", "devices/sda/queue/scheduler": "none [bfq] kyber\n",
		"devices/sda/device/model": "DISK \n", "devices/sda/device/serial": "S1\n",
		"devices/sda/sda1/partition": "1\n", "devices/sda/sda1/dev": "8:1\n",
		"devices/dm-0/dev": "253:0\n", "devices/dm-0/dm/name": "x\n", "devices/dm-0/slaves/sda1": "",
		"devices/zram0/dev": "251:0\n",
	})
	for _, d := range []string{"sda", "dm-0", "zram0"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(sys, "block"), 0o755), os.Symlink(filepath.Join(sys, "devices", d), filepath.Join(sys, "block", d))); err != nil {
			t.Fatal(err)
		}
	}
	want := Disk{Name: "sda", Major: 8, Size: 1 << 20, Model: "DISK S1", Scheduler: "bfq"}
	for _, minor := range []uint32{0, 1} {
		if d, err := Find(sys, 8, minor); err != nil || d != want {
			t.Errorf("8:%d: %+v, %v, want %+v", minor, d, err, want)
		}
	}
	if all, err := Disks(sys); err != nil || len(all) != 1 || all[0] != want {
		t.Errorf("disks %+v, %v, want %+v alone", all, err, want)
	}
	if id := want.Identity(); id != "DISK S1, 1048576 bytes" {
		t.Errorf("identity %q", id)
	}
	if _, err := Find(sys, 253, 0); !errors.Is(err, ErrNoRequests) || !strings.HasSuffix(err.Error(), "device mapper on /dev/sda1") {
		t.Errorf("device mapper: %v", err)
	}
	if _, err := Find(sys, 251, 0); !errors.Is(err, ErrNoRequests) {
		t.Errorf("zram: %v", err)
	}
	if _, err := Find(sys, 9, 9); !errors.Is(err, ErrNoDevice) {
		t.Errorf("unknown: %v", err)
	}
	for _, path := range []string{filepath.Join(sys, "none"), filepath.Join(sys, "devices/sda/dev"), sys, "/dev/null"} {
		if _, err := Open(sys, path); !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestOpenInKernel(t *testing.T) {
	testkit.NeedRoot(t)
	l, err := loop.New(t.TempDir(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open("/sys", l.Path)
	if err != nil || "/dev/"+d.Name != l.Path || d.Size != 1<<20 || d.Loop == "" || d.Scheduler == "" {
		t.Errorf("%+v, %v, of %s", d, err, l.Path)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
