package account

import (
	"errors"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

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
	spec.Programs["fl_taken"].Flags &^= unix.BPF_F_XDP_HAS_FRAGS // 5.18; see Taker
	if runtime.GOARCH != "amd64" {
		for _, name := range []string{"fl_timed", "fl_timer", "fl_called", "fl_call"} { // see interrupts
			delete(spec.Programs, name)
		}
	}
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
