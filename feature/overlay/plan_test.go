package overlay

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/policy"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
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

// What another feature is about to do counts as soon as policy asks for it, in either order of
// calls.
func TestOthers(t *testing.T) {
	r := newRig(t, bridged)
	n := r.nodes[0]
	on := true
	for _, x := range []struct {
		settings policy.Settings
		way      network.Mode
		word     string
	}{
		{policy.Settings{}, network.Peer, ""},
		{policy.Settings{NetCPU: policy.NetCPUIsolate}, network.End, network.Thread},
		{policy.Settings{NetCPU: policy.NetCPUAuto}, network.Peer, ""},
		{policy.Settings{Latency: &on}, network.End, network.Watched},
		{policy.Settings{}, network.Peer, ""},
	} {
		x.settings.Overlay = &on
		must(t, n.f.Apply(t.Context(), policy.Target{Container: n.c, Settings: x.settings}))
		o, err := n.f.Report(t.Context(), nil, api.Ask{Body: api.OverlayAsk{}})
		must(t, err)
		got := o.(api.Overlay).Containers[0].Ends[0].Ingress
		if got.Way != string(x.way) || got.Reason != x.word {
			t.Errorf("with %+v the way is %+v, want %s", x.settings, got, x.way)
		}
	}
}

// A container with a host end in an untrusted namespace is on no network that can be examined, and
// its status reports that.
func TestUntrusted(t *testing.T) {
	r := newRig(t, apart)
	n := r.nodes[0]
	n.c.Interfaces[0].Host.Trusted = false
	if err := n.apply(t, true); !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "eth0: its host end") {
		t.Errorf("got %v, want that its host end is the reason", err)
	}
	n.c.Interfaces[0].Host.Trusted = true
	must(t, r.nodes[1].apply(t, true))
	must(t, n.apply(t, true))
}
