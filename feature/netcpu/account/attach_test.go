package account

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// The kernel's verifier gives a program up after a million instructions, and the
// agent starts when all are through: they stay far below.
func TestVerified(t *testing.T) {
	testkit.NeedRoot(t)
	must(t, rlimit.RemoveMemlock())
	spec, err := loadAccount()
	must(t, err)
	coll, err := ebpf.NewCollection(spec)
	must(t, err)
	defer coll.Close()
	for name, p := range coll.Programs {
		info, err := p.Info()
		must(t, err)
		n, ok := info.VerifiedInstructions()
		if !ok {
			testkit.Skip(t, "kernel does not tell what it verified")
		}
		if n > 50_000 {
			t.Errorf("%s: %d instructions were verified", name, n)
		}
	}
}

// Containers' cgroups are looked for where the agent was told that they are.
func TestCgroupRoot(t *testing.T) {
	m := &Meter{cfg: Config{Proc: "/proc", Cgroup: t.TempDir()}}
	if f, err := m.openCgroup(1); !errors.Is(err, cgroup.ErrNone) {
		t.Errorf("below a folder without cgroups: %v, %v", f, err)
	}
}
