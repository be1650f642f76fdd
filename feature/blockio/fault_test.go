package blockio

import (
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	return New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Containers: topology.Running(s.Targets)}, Deadline: true})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.NeedRoot(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.IO == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
	}
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	// A thread that sleeps while it becomes SCHED_DEADLINE, and while it ends to be that, costs Linux
	// 6.18 its bandwidth until the domains of the scheduler are made anew.
	cg.Spinner(t)
	c := container.Container{ID: container.ID(id), Name: "task", Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU, IO: cg.IO}}
	due := policy.Settings{Realtime: killedBudget, IOYield: "auto"}
	spec := topology.Spec{Dir: t.TempDir(), Targets: []policy.Target{{Container: c, Settings: due}}}
	faults.Sweep(t, spec.Rig(t, nil),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0", "decide"}},
		faults.Case{Op: "decide", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Later: true},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}
