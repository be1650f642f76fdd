package irq

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// machine writes files below a proc and a sys.
func machine(t *testing.T, files map[string]string) (proc, sys string) {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		testkit.Write(t, filepath.Join(root, name), text+"\n")
	}
	return filepath.Join(root, "proc"), filepath.Join(root, "sys")
}

// No interrupt may go to an isolated CPU, or to one outside default_smp_affinity.
func TestUsable(t *testing.T) {
	const online, given = "sys/devices/system/cpu/online", "proc/irq/default_smp_affinity"
	const isolated, nohz = "sys/devices/system/cpu/isolated", "sys/devices/system/cpu/nohz_full"
	for _, c := range []struct {
		files map[string]string
		want  []int
	}{
		{map[string]string{online: "0-3", given: "f"}, []int{0, 1, 2, 3}},
		{map[string]string{online: "0-3", given: "f", isolated: "", nohz: "(null)"}, []int{0, 1, 2, 3}},
		{map[string]string{online: "0-3", given: "f", isolated: "2", nohz: "3"}, []int{0, 1}},
		{map[string]string{online: "0,2-3", given: "ffffffff,fffffffd"}, []int{0, 2, 3}},
		{map[string]string{online: "0-3", given: "3"}, []int{0, 1}},
		{map[string]string{online: "0-3"}, []int{0, 1, 2, 3}},
	} {
		proc, sys := machine(t, c.files)
		testkit.Gives(t, fmt.Sprint(c.files), c.want)(Usable(proc, sys))
	}
	for _, files := range []map[string]string{{online: "0-3", given: "x"}, {given: "f"}, {online: "0-3", given: "f", isolated: "x"}} {
		proc, sys := machine(t, files)
		testkit.Fails(t, fmt.Sprint(files), testkit.Err(Usable(proc, sys)))
	}
}

// Chosen distinguishes the owner's affinity from the kernel's and the driver's.
func TestChosen(t *testing.T) {
	for _, c := range []struct {
		name, now, hint, node string
		want                  bool
	}{
		{"the default", "0-3", "0", "-1", false},
		{"more than is online", "0-7", "0", "-1", false},
		{"near the device", "2-3", "0", "1", false},
		{"near another device", "2-3", "0", "0", true},
		{"the driver's, one for each queue", "2", "4", "-1", false},
		{"not what the driver hints", "1", "4", "-1", true},
		{"by hand", "1", "0", "-1", true},
		{"by hand, without a hint", "0-2", "", "", true},
	} {
		files := map[string]string{
			"sys/devices/system/cpu/online": "0-3", "proc/irq/default_smp_affinity": "f", "proc/irq/7/smp_affinity_list": c.now,
			"sys/devices/system/node/node0/cpulist": "0-1", "sys/devices/system/node/node1/cpulist": "2-3",
		}
		for file, text := range map[string]string{"affinity_hint": c.hint, "node": c.node} {
			if text != "" {
				files["proc/irq/7/"+file] = text
			}
		}
		proc, sys := machine(t, files)
		testkit.Gives(t, c.name, c.want)(Chosen(proc, sys, 7))
		testkit.Is(t, "one that is not there", testkit.Err(Chosen(proc, sys, 8)), journal.ErrGone)
	}
}

// irqbalance counts if it runs in our pid namespace, not in a container's. It does not place an
// interrupt that its options exclude.
func TestBalancing(t *testing.T) {
	proc := t.TempDir()
	process := func(pid, comm, ns, args string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Join(proc, pid, "ns"), 0o755))
		must(t, os.WriteFile(filepath.Join(proc, pid, "comm"), []byte(comm+"\n"), 0o644))
		must(t, os.WriteFile(filepath.Join(proc, pid, "cmdline"), []byte(args), 0o644))
		must(t, os.Symlink(ns, filepath.Join(proc, pid, "ns/pid")))
	}
	expect := func(irq int, runs, places bool) {
		t.Helper()
		if got, err := Balancing(proc); err != nil || got.Runs != runs || got.Places(irq) != places {
			t.Errorf("interrupt %d: %+v, %v, want %v, %v", irq, got, err, runs, places)
		}
	}
	process("self", "test", "pid:[1]", "")
	process("7", "sh", "pid:[1]", "")
	process("8", "irqbalance", "pid:[2]", "")
	expect(38, false, false)
	process("9", "irqbalance", "pid:[1]", "/usr/sbin/irqbalance\x00--foreground\x00--banirq=38\x00--banirq\x0039\x00-i40\x00-i\x0041\x00--banmod\x00x\x00")
	expect(37, true, true)
	for irq := 38; irq <= 41; irq++ {
		expect(irq, true, false)
	}
}
