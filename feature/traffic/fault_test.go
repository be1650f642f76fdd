package traffic_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	slots, err := identity.Open("/proc")
	if err != nil {
		return nil, err
	}
	return traffic.New(traffic.Config{
		Host:    feature.Host{Roots: kernel.Default(), Journal: j, NetNS: s.NetNS, Identity: slots, Ends: hook.Open("/proc", j), Containers: topology.Running(s.Targets)},
		Uplinks: map[string]uint64{"nic0": gbit},
	})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	_, one := h.add(fmt.Sprintf("one%d", os.Getpid()), "10.66.0.2/24", h.ns)
	_, two := h.add(fmt.Sprintf("two%d", os.Getpid()), "10.66.0.3/24", h.ns)
	ceil := policy.Settings{Egress: policy.Net{Ceil: 100 * mbit}, Ingress: policy.Net{Ceil: 50 * mbit}}
	share := policy.Settings{Egress: policy.Net{Weight: 2}, Ingress: policy.Net{Rate: 20 * mbit}}
	receive := policy.Settings{Ingress: policy.Net{Ceil: 50 * mbit}}
	spec := topology.Spec{NetNS: h.ns.NetNS(), Dir: h.dir, Targets: []policy.Target{
		{Container: one, Settings: ceil}, {Container: two, Settings: share}, {Container: one, Settings: share}, {Container: one, Settings: receive},
	}}
	faults.Sweep(t, spec.Rig(t, func() string { return h.Net(h.ns) }),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0"}},
		faults.Case{Op: "apply 1", From: []string{"apply 0"}, Undo: []string{"remove 1", "remove 0"}, Later: "apply 0"},
		faults.Case{Op: "apply 2", From: []string{"apply 0"}, Undo: []string{"remove 2"}},
		faults.Case{Op: "apply 3", From: []string{"apply 2"}, Undo: []string{"remove 3"}},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}

// A write of our own that fails is not taken for a change by others, however often it fails.
func TestWriteFails(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	_, c := h.add("writefails", "10.66.0.2/24", h.ns)
	share := policy.Settings{Egress: policy.Net{Rate: 20 * mbit}}
	s := faults.Start(t, topology.Spec{NetNS: h.ns.NetNS(), Dir: h.dir, Targets: []policy.Target{{Container: c, Settings: share}}})
	fault := faults.Fault{At: faults.Point{Kind: "write /proc/sys/net/ipvN/ip_forward_update_priority", Nth: 1}, Error: 1}
	for i := range 5 {
		if out := s.Do("apply 0", fault); out.Met == nil || out.Err == "" {
			t.Fatalf("a write that fails: %q at %v", out.Err, out.Met)
		}
		for _, op := range []string{"apply 0", "remove 0"} {
			if out := s.Do(op, faults.Fault{}); out.Err != "" {
				t.Fatalf("%s after failure %d: %s", op, i+1, out.Err)
			}
		}
	}
}
