package blockio

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// tree writes files below a directory. A file that begins with -> is a link to another.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if to, link := strings.CutPrefix(text, "->"); link {
			must(t, os.Symlink(filepath.Join(root, to), path))
		} else {
			must(t, os.WriteFile(path, []byte(text), 0o644))
		}
	}
	return root
}

// If a disk has a queue for each CPU, queues of other CPUs than the container's do not count.
func TestServing(t *testing.T) {
	files := map[string]string{
		"sys/block/nvme0n1": "->sys/devices/pci0/nvme/nvme0n1", "sys/devices/pci0/nvme/nvme0n1/device": "->sys/devices/pci0/nvme",
		"set/cpuset.cpus.effective": "2-3\n",
	}
	for cpu := range 4 {
		number := 50 + cpu
		files[fmt.Sprintf("sys/devices/pci0/nvme/msi_irqs/%d", number)] = "msi\n"
		for _, file := range []string{"effective_affinity_list", "smp_affinity_list"} { // that of a file can be written, and is not the kernel's
			files[fmt.Sprintf("proc/irq/%d/%s", number, file)] = fmt.Sprintf("%d\n", cpu)
		}
	}
	for set, want := range map[string]string{"": "[0 1 2 3]", "set": "[2 3]"} {
		root := tree(t, files)
		f := &BlockIO{cfg: Config{Host: feature.Host{Roots: kernel.Roots{Proc: filepath.Join(root, "proc"), Sys: filepath.Join(root, "sys")}}}}
		m := askers("nvme0n1")[0]
		if set != "" {
			m.target.Container.Cgroup.CPUSet = filepath.Join(root, set)
		}
		disks, remote, err := f.serving(m)
		if err != nil || len(disks) != 1 || len(remote) != 0 || fmt.Sprint(disks[0].serving()) != want {
			t.Errorf("cpuset %q: %+v, %v, %v, want %s", set, disks, remote, err, want)
		}
	}
}

// What serves a disk behind the network is the hardware over which it is reached.
func TestCarriers(t *testing.T) {
	testkit.NeedRoot(t)
	ns, far := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, ns, "flstore0", far, "flstore1")
	ns.Address(t, "flstore0", "10.93.7.1/24")
	const session = "devices/platform/host2/session1"
	sys := tree(t, map[string]string{
		"block/sda": "->" + session + "/target2:0:0/block/sda", session + "/target2:0:0/block/sda/dev": "8:0",
		session + "/connection1:0/iscsi_connection/connection1:0/address": "10.93.7.2\n",
		"block/sdb": "->devices/host3/session2/sdb", "devices/host3/session2/sdb/dev": "8:16",
		"devices/host3/session2/connection2:0/iscsi_connection/connection2:0/address": "10.94.0.1\n",
		"block/nbd0": "->devices/virtual/block/nbd0", "devices/virtual/block/nbd0/pid": "77\n",
		"class/net/flstore0/lower_bond0/x": "", "class/net/bond0/lower_eth1/x": "", "class/net/bond0/lower_eth2/x": "",
	})
	f := &BlockIO{cfg: Config{Host: feature.Host{Roots: kernel.Roots{Proc: "/proc", Sys: sys}}}}
	var err error
	f.net, err = netdev.Open(ns.Path)
	must(t, err)
	t.Cleanup(func() { must(t, f.net.Close()) })
	for disk, want := range map[string]string{
		"sda": "[eth1 eth2] <nil>", "vda": "[] <nil>",
		"sdb":  "[] sdb: route to 10.94.0.1",
		"nbd0": "[] nbd0 is behind the network (NBD), and the kernel does not say over which device: keep other interrupts off its CPUs by hand",
	} {
		got, err := f.carriers(disk)
		if text := fmt.Sprint(got, " ", err); !strings.HasPrefix(text, want) {
			t.Errorf("%s: %s, want %s", disk, text, want)
		}
	}
}
