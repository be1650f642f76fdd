package netcpu

import (
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// All features are given the same list.
func TestDecideLeavesTargets(t *testing.T) {
	var targets, before []policy.Target
	for id, mode := range []policy.NetCPU{policy.NetCPUObserve, policy.NetCPUAuto, policy.NetCPUCharge, policy.NetCPUAuto} {
		target := policy.Target{Container: container.Container{ID: container.ID(id)}, Settings: policy.Settings{NetCPU: mode}}
		targets, before = append(targets, target), append(before, target)
	}
	_, err := (&Accounts{Meter: read{}}).Decide(targets, true)
	testkit.Must(t, err)
	testkit.Same(t, "targets", before, targets)
}
