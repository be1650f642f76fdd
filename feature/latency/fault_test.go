package latency

import (
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

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
