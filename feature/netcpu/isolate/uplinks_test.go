package isolate

import (
	"path/filepath"
	"strconv"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/tenant"
)

// Where all CPUs compute, the uplinks' threads get as much as the group beside theirs that holds their
// receivers, and never less than the usual weight.
func TestUplinksWeigh(t *testing.T) {
	root, noted := t.TempDir(), testkit.Journal(t, journal.Open)
	is := New(Config{Feature: "netcpu", Journal: noted, Tenants: tenant.New("/proc", tenant.Network), Layout: cgroup.Layout{CPU: root, V2: root}, Drop: new(drop.Dropper)})
	group := func(name, weight string) string {
		dir := filepath.Join(root, name)
		testkit.Write(t, filepath.Join(dir, "cpu.weight"), weight)
		testkit.Write(t, filepath.Join(dir, "cpu.idle"), "0")
		return dir
	}
	is.host = &uplinks{at: place{group: group("fairlead-uplink-1", "100")}}
	for i, step := range []struct{ beside, weight, want string }{{"docker", "50", "100"}, {"kubepods", "2500", "2500"}, {"machine", "900", "2500"}, {"kubepods", "3000", "3000"}} {
		group(step.beside, step.weight)
		is.isolated[tenant.Key{NetNS: uint64(i)}] = &isolation{payer: container.Container{Cgroup: container.Cgroup{CPU: group(step.beside+"/pod/web", "7000")}}}
		must(t, is.weighUplinks())
		if got, err := cgroup.Weight(is.host.at.group); err != nil || strconv.FormatUint(got, 10) != step.want {
			t.Errorf("beside %s of %s: %d (%v), want %s", step.beside, step.weight, got, err, step.want)
		}
	}
	is.cfg.Drop = nil
	group("fairlead-uplink-1", "100") // as wide as what comes
	must(t, is.weighUplinks())
	if got, err := cgroup.Weight(is.host.at.group); err != nil || got/10 != 29 {
		t.Errorf("without early drop: %d (%v), want a tenth", got, err)
	}
}
