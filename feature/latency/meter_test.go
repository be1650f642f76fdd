package latency

import (
	"testing"

	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
)

func TestMain(m *testing.M) {
	topology.Reexec(appReexec)
	testkit.Main(m)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Nothing is in the kernel but between open and close.
func TestMeter(t *testing.T) {
	testkit.Smoke(t, "bpf:feature/latency")
	testkit.NeedRoot(t)
	who, err := identity.Open("/proc")
	must(t, err)
	defer who.Close()
	m, err := openMeter(1, who.Maps())
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
