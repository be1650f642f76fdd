package overlay

import (
	"testing"

	"github.com/fairlead-project/fairlead/feature"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// The plan of "overlay: on" is what it changes then; asking changes nothing.
func TestPlan(t *testing.T) {
	for form, want := range map[string]int{routed: 0, bridged: 0, apart: 1} {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			n := r.nodes[0]
			plan, err := n.f.Plan(t.Context(), n.c)
			must(t, err)
			if plan.Key != "fairlead.overlay" || plan.Value != "on" || len(plan.Steps) != want || len(n.j.Entries()) != 0 {
				t.Errorf("the plan is %+v, the journal has %v", plan, n.j.Entries())
			}
			must(t, n.apply(t, true))
			for _, e := range n.j.Entries() {
				if e.Ref.Kind == qdisc.KindFilter { // no value, but how old kernels get a program
					continue
				}
				if want == 0 || e.Ref != plan.Steps[0].Ref || e.Before != plan.Steps[0].Now || e.Wrote != plan.Steps[0].Value {
					t.Errorf("done %+v, and planned %+v", e, plan.Steps)
				}
			}
			again, err := n.f.Plan(t.Context(), n.c)
			must(t, err)
			if len(again.Steps) != want || want > 0 && again.Steps[0].Now != netdev.OurPair {
				t.Errorf("done, the plan is %+v", again)
			}
		})
	}
}

// Networks are found before a container asks for one, and without an identity: doctor makes the
// feature that way.
func TestExamine(t *testing.T) {
	r := newRig(t, routed)
	n := r.nodes[0]
	f, err := New(Config{
		Host: feature.Host{Roots: kernel.Roots{Proc: "/proc", Sys: "/sys", Cgroup: "/sys/fs/cgroup"}, Journal: n.j, Ends: hook.Open("/proc", n.j), NetNS: n.host.NetNS()},
	})
	must(t, err)
	defer func() { must(t, f.Close()) }()
	if v := f.Support(); v.Level != probe.Full {
		t.Errorf("support is %+v", v)
	}
	want := []probe.Finding{{Capability: "vx0", Area: "overlay network", Verdict: probe.Verdict{Level: probe.Full}, Detail: "vxlan, can be accelerated"}}
	if diff := cmp.Diff(want, f.Examine()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	r.Change(n.host, "vx0", func(h *netlink.Handle, l netlink.Link) error {
		return h.QdiscAdd(netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_ROOT}))
	})
	want[0].Verdict, want[0].Detail = probe.Verdict{Level: probe.Unavailable, Why: "left alone: vx0 has the qdisc htb, which packets would not meet: remove it, or shape the uplink"}, ""
	if diff := cmp.Diff(want, f.Examine()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
