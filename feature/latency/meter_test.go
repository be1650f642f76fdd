package latency

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}

var must = testkit.Must

// Nothing is in the kernel but between open and close.
func TestMeter(t *testing.T) {
	testkit.NeedRoot(t)
	who, err := identity.Open("/proc")
	must(t, err)
	defer who.Close()
	m, err := openMeter(1, who.Maps())
	must(t, err)
	must(t, m.add(1))
	all, err := m.read(1)
	must(t, err)
	testkit.Same(t, "seen", uint64(0), all[Egress][TCP].Seen)
	must(t, m.remove(1))
	must(t, m.close())
}

// The busiest CPU decides, however many there are, also when its counter has wrapped around. A look
// is as long as it takes to see twice the budget.
func TestFlood(t *testing.T) {
	was, now := make(map[int]uint32), make(map[int]uint32)
	for cpu := range uint32(64) {
		was[int(cpu)] = ^uint32(0) - cpu
		now[int(cpu)] = was[int(cpu)] + 100 + cpu
	}
	now[100] = 1 << 30 // since its last reading it has come online
	testkit.Same(t, "packets", float64(163), busiest(was, now))
	const budget = 5000
	for rate, want := range map[float64]time.Duration{0: look, 2 * budget: look, 20 * budget: look, 40 * budget: look / 2, 200 * budget: look / 10} {
		if got := lookFor(rate, budget); got != want {
			t.Errorf("looks for %v at %v/s, want %v", got, rate, want)
		}
	}
}

// attached returns the numbers of attached programs.
func (m *meter) attached() (programs, sockets int) {
	for _, s := range m.sockets {
		if s.link != nil {
			sockets++
		}
	}
	return len(m.links), sockets
}

func subject(s topology.Spec, _ *journal.Journal) (feature.Feature, error) {
	who, err := identity.Open("/proc")
	if err != nil {
		return nil, err
	}
	return New(Config{
		Host:    feature.Host{Roots: kernel.Default(), Identity: who, NetNS: s.NetNS, Containers: topology.Running(s.Targets)},
		Uplinks: []string{"nic0"}, Budget: 1 << 20,
	})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	h := newHost(t)
	h.bridge()
	_, c := h.add("web", "10.66.0.2/24", h.ns)
	on := true
	spec := topology.Spec{NetNS: h.ns.NetNS(), Dir: t.TempDir(), Targets: []policy.Target{{Container: c, Settings: policy.Settings{Latency: &on}}}}
	faults.Sweep(t, spec.Rig(t, func() string { return h.Net(h.ns) }),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0"}},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}
