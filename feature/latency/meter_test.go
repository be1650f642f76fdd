package latency

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(appReexec)
	testkit.Main(m)
}

var must = testkit.Must

// Nothing is in the kernel but between open and close.
func TestMeter(t *testing.T) {
	testkit.Smoke(t, "bpf:feature/latency")
	testkit.NeedRoot(t)
	who, err := identity.Open("/proc")
	must(t, err)
	defer who.Close()
	m, err := openMeter(1, MostStamps, who.Maps())
	must(t, err)
	must(t, m.add(1))
	all, err := m.read(1)
	must(t, err)
	if all[Egress][TCP].Seen != 0 {
		t.Errorf("seen %d", all[Egress][TCP].Seen)
	}
	must(t, m.remove(1))
	must(t, m.close())
}

// CPUs that each pass over a few more than they measure are no flood, however many there
// are; one with far more is.
func TestFlood(t *testing.T) {
	const budget, cpus = 5000, 64
	was, now := make([]uint64, cpus), make([]uint64, cpus)
	for cpu := range now {
		was[cpu] = 1 << 40
		now[cpu] = was[cpu] + budget/25
	}
	if flood(was, now, 2*budget) {
		t.Error("64 CPUs with 4 % over their budgets are taken for a flood")
	}
	now[63] = was[63] + 2*budget + 1
	if !flood(was, now, 2*budget) {
		t.Error("a CPU with three times its budget is not taken for a flood")
	}
}
