package overlay

import (
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	return New(Config{
		Host: feature.Host{Roots: kernel.Default(), Journal: j, Ends: hook.Open("/proc", j), NetNS: s.NetNS, Containers: topology.Running(s.Targets)},
	})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.Later(t)
	t.Parallel()
	r := newRig(t, bridged)
	on, n := true, r.nodes[0]
	spec := topology.Spec{NetNS: n.host.NetNS(), Dir: t.TempDir(), Targets: []policy.Target{{Container: n.c, Settings: policy.Settings{Overlay: &on}}}}
	faults.Sweep(t, spec.Rig(t, func() string { return r.Net(n.host) }),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0"}},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}
