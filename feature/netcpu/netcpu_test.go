package netcpu_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Isolate changes what Plan announced; Plan itself changes nothing.
func TestPlan(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	before := h.state()
	plan, err := h.netcpu.Plan(t.Context(), h.container)
	must(t, err)
	if plan.Key != "fairlead.netcpu" || plan.Value != string(policy.NetCPUIsolate) {
		t.Errorf("the plan is for %s = %s", plan.Key, plan.Value)
	}
	same(t, "after Plan", h.state(), before)
	h.nothing("after Plan")
	planned := make(map[journal.Ref]feature.Step)
	var coming []string
	for _, s := range plan.Steps {
		planned[s.Ref] = s
		if strings.HasPrefix(s.Ref.Object, "napi/") {
			coming = append(coming, s.Ref.Object+" "+s.Value)
		}
	}
	if want := []string{"napi/eth0 " + payer(h.container), "napi/nic0 " + h.uplinkGroup()}; !slices.Equal(coming, want) {
		t.Errorf("threads that come: %q, want %q", coming, want)
	}

	h.apply(h.container, policy.NetCPUIsolate)
	for _, e := range h.notes() {
		s, ok := planned[e.Ref]
		switch e.Ref.Kind {
		case sched.KindKthread, sched.KindSlice, sched.KindNice, sched.KindAffinity: // of new threads
			continue
		case qdisc.KindFilter: // no value: how a program is attached on old kernels
			continue
		}
		if !ok && !strings.Contains(e.Ref.Object, "fairlead-uplink-") {
			t.Errorf("changed, but not planned: %+v", e)
		} else if ok && (s.Now != e.Before || s.Value != e.Wrote) {
			t.Errorf("planned %+v, and done %+v", s, e)
		}
	}
	again, err := h.netcpu.Plan(t.Context(), h.container)
	must(t, err)
	for _, s := range again.Steps {
		if s.Now != s.Value && !strings.HasPrefix(s.Ref.Object, "napi/") {
			t.Errorf("isolated, and still to be changed: %+v", s)
		}
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	shared := h.container
	shared.HostNetwork = true
	if _, err := h.netcpu.Plan(t.Context(), shared); err == nil || !strings.Contains(err.Error(), "host's network namespace") {
		t.Errorf("of a container in the host's network: %v", err)
	}
}

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
	testkit.Later(t)
	t.Parallel()
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
