package blockio

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// at returns an interrupt that can be moved, with the count of a data interrupt.
func at(number int, cpus ...int) interrupt {
	return interrupt{number: number, cpus: cpus, count: 7, movable: true}
}

func (i interrupt) fixed() interrupt              { i.movable = false; return i }
func (i interrupt) heldBy(why string) interrupt   { i.held = why; return i }
func (i interrupt) counted(n uint64) interrupt    { i.count = n; return i }
func (i interrupt) movedTo(cpus ...int) interrupt { i.moved = cpus; return i }

// Network interrupts on a disk's CPUs move to other CPUs, in turn. All others stay. The error lists
// what is impossible.
func TestSeparate(t *testing.T) {
	vda := device{"vda", []interrupt{at(35, 1).fixed().counted(3), at(36, 0).fixed().counted(90_000)}} // 35: its configuration
	nvme := device{"nvme0n1", []interrupt{at(50, 0).fixed(), at(51, 1).fixed()}}
	eth := device{"eth0", []interrupt{at(38, 0), at(39, 1)}}
	fixed := device{"eth1", []interrupt{at(40, 0).fixed(), at(41, 1).fixed()}}
	nic := func(irqs ...interrupt) device { return device{"eth2", irqs} }
	two, four := []int{0, 1}, []int{0, 1, 2, 3}
	for _, c := range []struct {
		name            string
		disks, networks []device
		ends            []string
		usable          []int
		want            string
		why             string
	}{
		{"two CPUs", []device{vda}, []device{eth}, nil, two, "{[{38 [1]}] [] [1]}", ""},
		{"a queue for each of four", []device{vda}, []device{nic(at(60, 0), at(61, 1), at(62, 2), at(63, 3))}, nil, four, "{[{60 [1]}] [] [1 2 3]}", ""},
		{"of two devices", []device{vda}, []device{eth, nic(at(60, 0), at(61, 1), at(62, 2), at(63, 3))}, nil, four, "{[{38 [2]} {60 [3]}] [] [1 2 3]}", ""},
		{"all on the disk's", []device{vda}, []device{nic(at(60, 0), at(61, 0), at(62, 0), at(63, 0))}, nil, four, "{[{60 [1]} {61 [2]} {62 [3]} {63 [1]}] [] [1 2 3]}", ""},
		{"on the disk's by all CPUs", []device{vda}, []device{nic(at(60, 0, 1, 2, 3))}, nil, four, "{[{60 [1]}] [] [1 2 3]}", ""},
		{"its configuration", []device{vda}, []device{nic(at(60, 0).counted(1), at(61, 1).counted(9000))}, nil, four, "{[] [] [1 2 3]}", ""},
		{"isolated CPUs", []device{vda}, []device{eth}, nil, []int{0, 3}, "{[{38 [3]}] [] [3]}", ""},
		{"moved before", []device{vda}, []device{nic(at(60, 0, 1, 2, 3).movedTo(3), at(61, 0))}, nil, four, "{[{60 [3]} {61 [1]}] [] [1 2 3]}", ""},
		{"moved before, to where another disk is served now", []device{vda, nvme}, []device{nic(at(60, 0).movedTo(1))}, nil, four, "{[{60 [2]}] [] [2 3]}", ""},
		{"moved before, for another disk", []device{vda}, []device{nic(at(60, 2).movedTo(3))}, nil, four, "{[] [] [1 2 3]}", ""},
		{"by hand", []device{vda}, []device{nic(at(60, 0).heldBy(byHand), at(61, 0), at(62, 0).heldBy(byHand), at(63, 3).heldBy(byHand))}, nil, four, "{[{61 [1]}] [] [1 2 3]}",
			"somebody has chosen the CPUs of interrupts 60,62 of eth2, which serve disks: give them others, or all (0-3), in /proc/irq/N/smp_affinity_list"},
		{"irqbalance", []device{vda}, []device{nic(at(60, 0).heldBy(byBalancing))}, []string{"veth1"}, two, "{[] [veth1] [1]}",
			"irqbalance places interrupts 60 of eth2, and disks are served by the same CPUs: stop it"},
		{"one", []device{vda}, []device{eth}, nil, []int{0}, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0)"},
		{"a disk on all", []device{vda, nvme}, []device{eth}, nil, two, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0-1)"},
		{"a disk without", nil, []device{eth}, nil, two, "{[] [] []}", "no disk of its reservations has interrupts of its own"},
		{"a network without", []device{vda}, nil, nil, two, "{[] [] [1]}", "no network device of this host has interrupts of its own, and no container a veth"},
		{"one that is fixed", []device{vda}, []device{eth, fixed}, nil, two, "{[{38 [1]}] [eth1] [1]}", ""},
		{"veths alone", []device{vda}, nil, []string{"veth1", "veth2"}, two, "{[] [veth1 veth2] [1]}", ""},
		{"veths, a disk on all", []device{vda, nvme}, nil, []string{"veth1"}, two, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0-1)"},
	} {
		got, err := separate(c.disks, c.networks, c.ends, c.usable)
		if fmt.Sprint(got) != c.want || (err == nil) != (c.why == "") || err != nil && !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, %v, want %s, %q", c.name, got, err, c.want, c.why)
		}
	}
}

// The work behind an immovable interrupt moves to other CPUs: by the receive queue that hands it over,
// or by the thread that polls. Settings of others stay, and the error lists them.
func TestSteer(t *testing.T) {
	h := newHost(t)
	ns, far := testkit.NetNS(t), testkit.NetNS(t)
	const dev = "flsteer0"
	testkit.Veth(t, ns, dev, far, "flsteer1")
	var err error
	h.net, err = netdev.Open(ns.Path)
	must(t, err)
	index, err := h.net.Index(dev)
	must(t, err)
	by := journal.Owner{Feature: name}
	turn := func(k journal.Knob, value string) error { return h.journal.TurnUntil(k, value, by, time.Time{}) }
	steer := func() string {
		t.Helper()
		left, err := h.steer(dev, []int{1}, turn)
		must(t, err)
		if left == nil {
			return ""
		}
		return left.Error()
	}
	restored := func(k journal.Knob) {
		t.Helper()
		// No process is in that namespace, so kernel.Opener cannot find it.
		_, err := h.journal.Restore(func(journal.Ref) (journal.Knob, error) { return k, nil }, func(e journal.Entry) bool { return e.Ref == k.Ref() })
		must(t, err)
	}

	rps := h.net.RPS(index, 0)
	before := value(t, rps)
	if left := steer(); left != "" || value(t, rps) != netdev.CPUMask([]int{1}, before) {
		t.Errorf("rps_cpus %q, was %q; left: %q", value(t, rps), before, left)
	}
	if left := steer(); left != "" || len(h.journal.Entries()) != 1 {
		t.Errorf("again: left %q, %+v", left, h.journal.Entries())
	}
	if runtime.NumCPU() > 1 {
		ns.Address(t, dev, "10.93.0.1/24")
		far.Address(t, "flsteer1", "10.93.0.2/24")
		was, got := received(t, 1), uint64(0)
		must(t, far.Do(func() error { return sendFrom(0, "10.93.0.1:9", 100) }))
		for end := time.Now().Add(10 * time.Second); got < 100 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			got = received(t, 1) - was
		}
		if got < 100 {
			t.Errorf("CPU 1 received %d of 100 packets that CPU 0 had sent", got)
		}
	}
	restored(rps)
	testkit.Same(t, "rps_cpus", before, value(t, rps))
	theirs := netdev.CPUMask([]int{0}, before)
	must(t, rps.Write(theirs))
	if left := steer(); !strings.Contains(left, "queue 0 of "+dev) || value(t, rps) != theirs || len(h.journal.Entries()) != 0 {
		t.Errorf("rps_cpus %q of somebody else, was %q; left: %q", value(t, rps), theirs, left)
	}

	// A thread with the same name may poll another device.
	stranger := testkit.NetNS(t)
	testkit.Veth(t, stranger, dev, far, "flsteer2")
	theirNS, err := netdev.Open(stranger.Path)
	must(t, err)
	t.Cleanup(func() { must(t, theirNS.Close()) })
	theirIndex, err := theirNS.Index(dev)
	must(t, err)
	must(t, errors.Join(theirNS.Offload(theirIndex, netdev.GRO).Write(netdev.GRO.On()), theirNS.Threaded(theirIndex).Write("1")))
	must(t, rps.Write(before))
	if left := steer(); left != "" || value(t, rps) != netdev.CPUMask([]int{1}, before) {
		t.Errorf("beside a thread of another's: rps_cpus %q; left: %q", value(t, rps), left)
	}
	// A later setting of an administrator stays.
	must(t, rps.Write(theirs))
	if left := steer(); !strings.Contains(left, "queue 0 of "+dev) || value(t, rps) != theirs {
		t.Errorf("rps_cpus %q, and somebody has set %q since; left: %q", value(t, rps), theirs, left)
	}

	must(t, errors.Join(h.net.Offload(index, netdev.GRO).Write(netdev.GRO.On()), h.net.Threaded(index).Write("1")))
	threads, err := h.pollers(index)
	must(t, err)
	if len(threads) == 0 {
		t.Fatal("the device has no thread")
	}
	cpus := sched.Affinity("/proc", threads[0])
	before = value(t, cpus)
	if left := steer(); left != "" || value(t, cpus) != "1" || value(t, rps) != theirs {
		t.Errorf("CPUs of the thread %q, were %q; rps_cpus %q; left: %q", value(t, cpus), before, value(t, rps), left)
	}
	restored(cpus)
	testkit.Same(t, "CPUs of the thread", before, value(t, cpus))
	other := journal.Owner{Feature: "netcpu"}
	must(t, h.journal.Turn(cpus, "0", other))
	if left := steer(); !strings.Contains(left, "somebody else") || value(t, cpus) != "0" {
		t.Errorf("CPUs of a thread that another feature has placed: %q; left: %q", value(t, cpus), left)
	}
	restored(cpus)
}

// received counts the packets that a CPU has received, from any device.
func received(t *testing.T, cpu int) uint64 {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	must(t, err)
	first, _, _ := strings.Cut(strings.Split(string(text), "\n")[cpu], " ")
	n, err := strconv.ParseUint(first, 16, 64)
	must(t, err)
	return n
}

// sendFrom sends datagrams to an address from one CPU.
func sendFrom(cpu int, to string, count int) error {
	var before, set unix.CPUSet
	set.Set(cpu)
	if err := errors.Join(unix.SchedGetaffinity(0, &before), unix.SchedSetaffinity(0, &set)); err != nil {
		return err
	}
	defer unix.SchedSetaffinity(0, &before)
	conn, err := net.Dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range count {
		// Refused: no socket listens there, and the last datagram was answered.
		if _, err := conn.Write([]byte("x")); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
	}
	return nil
}

// On a disk with a queue for each CPU, queues of CPUs outside the container's cpuset do not count.
func TestServing(t *testing.T) {
	files := map[string]string{
		"sys/block/nvme0n1": "->sys/devices/pci0/nvme/nvme0n1", "sys/devices/pci0/nvme/nvme0n1/device": "->sys/devices/pci0/nvme",
		"set/cpuset.cpus.effective": "2-3\n",
	}
	for cpu := range 4 {
		number := 50 + cpu
		files[fmt.Sprintf("sys/devices/pci0/nvme/msi_irqs/%d", number)] = "msi\n"
		for _, file := range []string{"effective_affinity_list", "smp_affinity_list"} { // the file can be changed here; it is not the kernel's
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

// A disk behind the network is served by the hardware that leads to it.
func TestCarriers(t *testing.T) {
	testkit.NeedRoot(t)
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

// A disk behind the network, on the kernel's own NVMe target: its path is found, and a disk with
// several paths is refused with the remedy.
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
