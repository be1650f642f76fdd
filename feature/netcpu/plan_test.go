package netcpu_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
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
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal after Plan: %+v", left)
	}
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
