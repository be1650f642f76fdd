package latency

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/sandbox"
)

func TestMain(m *testing.M) {
	for _, reexec := range []func([]string) (int, bool){sandbox.Reexec, load.Reexec} {
		if status, ok := reexec(os.Args); ok {
			os.Exit(status)
		}
	}
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
