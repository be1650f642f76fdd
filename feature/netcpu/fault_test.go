package netcpu_test

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	who, err := identity.Open("/proc")
	if err != nil {
		return nil, err
	}
	return netcpu.New(netcpu.Config{
		Host: feature.Host{Roots: kernel.Default(), Journal: j, NetNS: s.NetNS, Identity: who, Ends: hook.Open("/proc", j), Containers: topology.Running(s.Targets)},
	})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	h := newHost(t, sandbox.CPU{Quota: 50 * time.Millisecond})
	spec := topology.Spec{NetNS: h.ns.NetNS(), Dir: t.TempDir(), Targets: []policy.Target{h.target(policy.NetCPUIsolate), h.target(policy.NetCPUCharge)}}
	faults.Sweep(t, spec.Rig(t, func() string { return h.Net(h.ns) }),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0"}},
		faults.Case{Op: "apply 1", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}
