package irq

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// An interrupt that is movable moves, and Restore moves it back. One that is not reports so.
func TestAffinityInKernel(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	entries, err := os.ReadDir("/proc/irq")
	must(t, err)
	irq := -1
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		before, err := Affinity("/proc", n).Read()
		must(t, err)
		movable := Movable("/proc", n)
		testkit.Gives(t, fmt.Sprintf("interrupt %d had CPUs", n), before)(Affinity("/proc", n).Read())
		// Take one that a driver has requested, preferably one with a CPU to take away.
		if cpus, err := CPUs("/proc", n); movable && err == nil && len(cpus) == 1 && (irq < 0 || before != strconv.Itoa(cpus[0])) {
			irq = n
		}
	}
	if irq < 0 {
		testkit.Skip(t, "no interrupt of this machine can be moved")
	}
	knob := Affinity("/proc", irq)
	before, err := knob.Read()
	must(t, err)
	all, err := cgroup.ParseCPUs(before)
	must(t, err)
	j := testkit.Journal(t, journal.Open)
	last := strconv.Itoa(all[len(all)-1])
	must(t, j.Turn(knob, last, journal.Owner{Feature: "test"}))
	testkit.Gives(t, fmt.Sprintf("interrupt %d has CPUs", irq), last)(knob.Read())
	testkit.Check(t, testkit.Err(j.Restore(func(r journal.Ref) (journal.Knob, error) { return Open("/proc", r) }, nil)))
	testkit.Gives(t, fmt.Sprintf("interrupt %d has CPUs", irq), before)(knob.Read())
	for _, bad := range []string{"", "x", "5-3"} {
		testkit.Fails(t, fmt.Sprintf("%q was written", bad), knob.Write(bad))
	}
}

func TestOf(t *testing.T) {
	const msi = "devices/pci0/0000:00:02.0/msi_irqs/"
	sys := testkit.Tree(t, map[string]string{msi + "36": "", msi + "35": "", msi + "x": ""})
	for _, dir := range []string{"devices/pci0/0000:00:02.0/virtio1/block/vda", "devices/virtual/net/lo", "devices/pci0/0000:00:09.0/virtio9/net/eth9"} {
		must(t, os.MkdirAll(filepath.Join(sys, dir), 0o755))
	}
	vda, eth9 := filepath.Join(sys, "devices/pci0/0000:00:02.0/virtio1/block/vda"), filepath.Join(sys, "devices/pci0/0000:00:09.0/virtio9/net/eth9")
	must(t, os.Symlink("../..", filepath.Join(vda, "device")))
	must(t, os.Symlink("../..", filepath.Join(eth9, "device")))
	bonding := filepath.Join(sys, "class/net/bonding_masters") // a file, where the bonding module is loaded
	testkit.Write(t, bonding, "bond0\n")
	for device, want := range map[string][]int{vda: {35, 36}, eth9: nil, bonding: nil, filepath.Join(sys, "devices/virtual/net/lo"): nil, filepath.Join(sys, "none"): nil} {
		testkit.Gives(t, device, want)(Of(sys, device))
	}
}

func TestOpen(t *testing.T) {
	proc := t.TempDir()
	k := Affinity(proc, 41)
	if got, err := Open(proc, k.Ref()); err != nil || got.Ref() != k.Ref() {
		t.Errorf("%v, %v", got, err)
	}
	testkit.Is(t, "one that is not there", testkit.Err(k.Read()), journal.ErrGone)
	for _, object := range []string{"", "/irq/41/smp_affinity_list", proc + "/irq/41/smp_affinity", proc + "/irq/../41/smp_affinity_list", proc + "/irq/x/smp_affinity_list", proc + "x/irq/4/smp_affinity_list"} {
		testkit.Fails(t, object, testkit.Err(Open(proc, journal.Ref{Kind: KindIRQ, Object: object})))
	}
	testkit.Fails(t, "another kind was opened", testkit.Err(Open(proc, journal.Ref{Kind: "file", Object: k.Ref().Object})))
}
