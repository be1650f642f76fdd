package blockio

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

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
		root := testkit.Tree(t, files)
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
	ns, far := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, ns, "flstore0", far, "flstore1")
	ns.Address(t, "flstore0", "10.93.7.1/24")
	const session = "devices/platform/host2/session1"
	sys := testkit.Tree(t, map[string]string{
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

// A disk behind the network, of the kernel's own NVMe target: how it is reached is told, and
// one that has several paths is refused with what would mend that.
func TestRemoteDisk(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t)
	const fabrics, address, port = "/dev/nvme-fabrics", "127.0.0.1", "4420"
	if _, err := os.Stat("/sys/module/nvmet_tcp"); err != nil {
		testkit.Skip(t, "the kernel has no NVMe over TCP")
	}
	config := t.TempDir()
	must(t, unix.Mount("none", config, "configfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(config, 0)) })
	write := func(path, text string) {
		t.Helper()
		must(t, os.WriteFile(path, []byte(text), 0))
	}
	const nqn = "nqn.2014-08.org.fairlead:test"
	subsystem, at := filepath.Join(config, "nvmet/subsystems", nqn), filepath.Join(config, "nvmet/ports/1")
	namespace, link := filepath.Join(subsystem, "namespaces/1"), filepath.Join(at, "subsystems", nqn)
	for _, dir := range []string{subsystem, namespace, at} {
		must(t, os.Mkdir(dir, 0o755))
		t.Cleanup(func() { must(t, os.Remove(dir)) })
	}
	write(filepath.Join(subsystem, "attr_allow_any_host"), "1")
	write(filepath.Join(namespace, "device_path"), h.disk(1000).Path)
	write(filepath.Join(namespace, "enable"), "1")
	t.Cleanup(func() { write(filepath.Join(namespace, "enable"), "0") })
	for name, value := range map[string]string{"trtype": "tcp", "adrfam": "ipv4", "traddr": address, "trsvcid": port} {
		write(filepath.Join(at, "addr_"+name), value)
	}
	must(t, os.Symlink(subsystem, link))
	t.Cleanup(func() { must(t, os.Remove(link)) })

	f, err := os.OpenFile(fabrics, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	_, err = fmt.Fprintf(f, "transport=tcp,traddr=%s,trsvcid=%s,nqn=%s,nr_io_queues=1", address, port, nqn)
	must(t, err)
	answer := make([]byte, 64)
	n, err := f.Read(answer)
	must(t, err)
	instance, _, _ := strings.Cut(strings.TrimPrefix(string(answer[:n]), "instance="), ",")
	controller := filepath.Join("/sys/class/nvme/nvme" + instance)
	t.Cleanup(func() { write(filepath.Join(controller, "delete_controller"), "1") })

	disk := ""
	for end := time.Now().Add(30 * time.Second); disk == "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		found, _ := filepath.Glob("/sys/block/nvme*n1")
		for _, d := range found {
			if r, ok := block.FindRemote("/sys", filepath.Base(d)); ok && len(r.Paths) > 0 {
				disk = filepath.Base(d)
			}
		}
	}
	r, _ := block.FindRemote("/sys", disk)
	if r.Transport != "NVMe/TCP" || len(r.Paths) != 1 || r.Paths[0].To != netip.MustParseAddr(address) {
		t.Fatalf("disk %q is reached by %+v", disk, r)
	}
	h.net, err = netdev.Open("/proc/self/ns/net")
	must(t, err)
	if got, err := h.carriers(disk); err != nil || fmt.Sprint(got) != "[lo]" {
		t.Errorf("%s over %v, %v", disk, got, err)
	}
	c, _ := h.container("c")
	err = h.Apply(t.Context(), target(t, c, "io.reserve: /dev/"+disk+" riops=1", "io.interrupts: apart"))
	t.Log(err)
	if !errors.Is(err, block.ErrNoRequests) || !strings.Contains(err.Error(), "nvme_core.multipath=N") {
		t.Errorf("%v", err)
	}
}
