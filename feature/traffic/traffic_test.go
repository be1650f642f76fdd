package traffic_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// fake returns a container that sends nothing and only takes part in the division.
func fake(id container.ID) container.Container {
	return container.Container{ID: 1<<40 + id, HostNetwork: true, Name: "fake"}
}

// class is a class of HTB as the kernel shows it, in bit/s.
type class struct {
	rate, ceil uint64
	prio       uint32
}

// classesOf returns the classes of a device by minor, as the kernel shows them.
func (h *host) classesOf(at *sandbox.Box, dev string) map[uint16]class {
	h.t.Helper()
	out := make(map[uint16]class)
	h.Change(at, dev, func(n *netlink.Handle, l netlink.Link) error {
		list, err := n.ClassList(l, 0)
		for _, c := range list {
			if c, ok := c.(*netlink.HtbClass); ok {
				out[uint16(c.Handle)] = class{c.Rate * 8, c.Ceil * 8, c.Prio}
			}
		}
		return err
	})
	return out
}

// minor returns the minor of a container's class.
func (h *host) minor(c container.Container) uint16 {
	return uint16(h.slots.Lookup(c.TenantKey()))
}

// classes returns the rate of each class of the uplink.
func (h *host) classes() map[uint16]uint64 {
	h.t.Helper()
	out := make(map[uint16]uint64)
	for minor, c := range h.classesOf(h.ns, "nic0") {
		out[minor] = c.rate
	}
	return out
}

func TestPlanInForce(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.start()
	must(t, h.apply(fake(1), policy.Net{Weight: 3}))
	must(t, h.apply(fake(2), policy.Net{Rate: 150 * mbit}))
	mostly(t, h.apply(fake(3), policy.Net{Ceil: 100 * mbit}))
	want := func(rates map[uint16]uint64) {
		t.Helper()
		got := h.classes()
		rates[qdisc.MinorTop] = gbit
		if len(got) != len(rates) {
			t.Fatalf("classes %v, want %v", got, rates)
		}
		for minor, r := range rates {
			if got[minor]/8 != r/8 {
				t.Fatalf("classes %v, want %v", got, rates)
			}
		}
	}
	// 800 Mbit/s are left: 1 for the host, 3, and 1 that its ceil cuts.
	want(map[uint16]uint64{qdisc.MinorDefault: 175 * mbit, 1: 525 * mbit, 2: 150 * mbit, 3: 100 * mbit})

	// Refused: nothing changes, and its slot is free again.
	var r *model.Refusal
	err := h.apply(fake(4), policy.Net{Rate: 801 * mbit})
	if !errors.As(err, &r) || !errors.Is(err, model.ErrOverLink) || !strings.Contains(err.Error(), "uplink nic0: rate refused: ") {
		t.Errorf("more than the link: %v", err)
	}
	if err := h.apply(fake(2), policy.Net{Rate: 951 * mbit}); !errors.As(err, &r) {
		t.Errorf("more than the link: %v", err)
	}
	want(map[uint16]uint64{qdisc.MinorDefault: 175 * mbit, 1: 525 * mbit, 2: 150 * mbit, 3: 100 * mbit})

	// Its policy ends, or the container does.
	must(t, h.apply(fake(3), policy.Net{}))
	want(map[uint16]uint64{qdisc.MinorDefault: 200 * mbit, 1: 600 * mbit, 2: 150 * mbit})
	must(t, h.traffic.Remove(t.Context(), fake(2).ID))
	want(map[uint16]uint64{qdisc.MinorDefault: 950 * mbit / 4, 1: 950 * mbit / 4 * 3})
	testkit.Same(t, "samples", 18, len(h.traffic.Snapshot().Samples))
}

// An operator's root qdisc comes back. One that replaces ours is reported and left alone.
func TestOperator(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	tbf := func(handle uint32) {
		h.Netlink(h.ns, func(n *netlink.Handle) error {
			return n.QdiscReplace(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: h.nic0, Handle: handle, Parent: netlink.HANDLE_ROOT}, Rate: gbit / 8, Limit: 300000, Buffer: 200000})
		})
	}
	tbf(0x10000)
	before := h.state()
	h.start()
	must(t, h.apply(fake(1), policy.Net{Weight: 3}))
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	testkit.Same(t, "after Remove", before, h.state())

	must(t, h.apply(fake(1), policy.Net{Weight: 3}))
	tbf(0x20000)
	theirs := h.state()
	for range 2 {
		testkit.Fails(t, "replaced by someone", h.apply(fake(1), policy.Net{Weight: 3}), "someone has replaced the root qdisc", "all containers' policy")
	}
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	if want := strings.Replace(theirs, "forward-priority 0", "forward-priority 1", 1); h.state() != want {
		t.Errorf("after Remove:\n%swas\n%s", h.state(), theirs)
	}
}

// The feature notices an uplink that disappears, is renamed, or comes back: it notifies the agent, and
// Apply divides the uplink. Nothing stays on a device that is no longer an uplink.
func TestUplinkVanishes(t *testing.T) {
	testkit.OnKernels(t)
	h := newHost(t, gbit)
	h.start()
	told := make(chan container.ID, 1000)
	h.traffic.Notify(func(id container.ID) { told <- id })
	before := h.state()
	apply := func() error { return h.apply(fake(1), policy.Net{Weight: 3}) }
	must(t, apply())
	next := func(words ...string) {
		t.Helper()
		<-told
		holds(t, apply(), false, words...)
		if len(words) == 0 && len(h.classes()) != 3 {
			t.Errorf("classes %v", h.classes())
		}
	}
	must(t, h.ns.Delete("nic0"))
	next("no uplink nic0")
	must(t, sandbox.Wire(sandbox.End{Box: h.wire, Name: "wire2"}, sandbox.End{Box: h.ns, Name: "nic0"}))
	h.nic0 = h.Index(h.ns, "nic0")
	next()
	rename := func(from, to string) {
		h.Change(h.ns, from, (*netlink.Handle).LinkSetDown)
		h.Change(h.ns, from, func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetName(l, to) })
	}
	rename("nic0", "nic9")
	next("no uplink nic0")
	if now := h.state(); strings.Contains(now, "666c:") {
		t.Errorf("with another name: %s", now)
	}
	rename("nic9", "nic0")
	next()
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	h.undone(before)
	rename("nic0", "nic9") // and there is none when the first container comes
	holds(t, apply(), false, "no uplink nic0")
	rename("nic9", "nic0")
	next()
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	h.undone(before)
}

// Containers that share a network namespace are one tenant.
func TestSharedNamespace(t *testing.T) {
	h, _, one := newBridged(t)
	h.start()
	two := one
	two.ID++
	must(t, h.apply(one, policy.Net{Weight: 3}))
	testkit.Fails(t, "another policy for the same network", h.apply(two, policy.Net{Weight: 4}), "shares its network")
	must(t, h.apply(two, policy.Net{Weight: 3}))
	if got := h.classes(); len(got) != 3 {
		t.Errorf("classes %v", got)
	}
	must(t, h.traffic.Remove(t.Context(), one.ID))
	if got := h.classes(); len(got) != 3 {
		t.Errorf("after the first has ended: classes %v", got)
	}
	must(t, h.traffic.Remove(t.Context(), two.ID))
	must(t, h.traffic.Remove(t.Context(), two.ID))
	testkit.None(t, "journal", h.journal.Entries())
}

// ending is a context that ends after that many looks at it.
type ending struct {
	context.Context
	looks int
}

func (e *ending) Err() error {
	if e.looks--; e.looks < 0 {
		return context.Canceled
	}
	return nil
}

// A call may end between any two devices of a container. The next call adds what is missing, and Remove
// leaves the host as before.
func TestApplyEnds(t *testing.T) {
	h, box, c := newBridged(t)
	must(t, h.ns.Bridge("br1", netip.MustParsePrefix("10.70.0.254/24")))
	h.Wire(sandbox.End{Box: h.ns, Name: "hsecond", Bridge: "br1"}, sandbox.End{Box: box, Name: "eth1", Addr: netip.MustParsePrefix("10.70.0.2/24")})
	c.Interfaces = append(c.Interfaces, h.Veth(box, "eth1", h.ns, "hsecond"))
	h.start()
	before := h.state()
	target := policy.Target{Container: c, Settings: policy.Settings{Egress: policy.Net{Ceil: slow}}}
	for n := 0; ; n++ {
		err := h.traffic.Apply(&ending{t.Context(), n}, target)
		if err == nil && n == 0 {
			t.Fatal("a call that has ended before its first device reports success")
		}
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("ended after %d looks: %v", n, err)
			}
			must(t, h.traffic.Apply(t.Context(), target))
		}
		testkit.Same(t, fmt.Sprintf("ended after %d looks: IFBs", n), 1, h.ifbs())
		must(t, h.traffic.Remove(t.Context(), c.ID))
		if h.state() != before || h.ifbs() != 0 || len(h.journal.Entries()) != 0 {
			t.Fatalf("ended after %d looks: %d IFBs\n%swas\n%s%+v", n, h.ifbs(), h.state(), before, h.journal.Entries())
		}
		if err == nil {
			return
		}
	}
}

// Each of many tenants has a separate class, and all classes go without a trace.
func TestManyTenants(t *testing.T) {
	n := testkit.Scale(t, 100, 1000)
	h := newHost(t, 10*gbit)
	h.start()
	for i := range n {
		// A guarantee changes no other class, a weight changes all.
		must(t, h.apply(fake(container.ID(i+1)), policy.Net{Rate: 5 * mbit}))
	}
	if got := len(h.classes()); got != n+2 {
		t.Errorf("%d classes for %d tenants", got, n)
	}
	before := h.journal.Entries()
	must(t, h.apply(fake(container.ID(n/2)), policy.Net{Rate: 5 * mbit}))
	if after := h.journal.Entries(); len(after) != len(before) {
		t.Errorf("%d entries, had %d", len(after), len(before))
	}
	for i := range n {
		must(t, h.traffic.Remove(t.Context(), fake(container.ID(i+1)).ID))
	}
	testkit.None(t, "journal", h.journal.Entries())
}

// When all slots are taken, the next tenant is refused with the reason, and the others continue as
// before.
func TestEverySlotTaken(t *testing.T) {
	h := newHost(t, gbit)
	h.start()
	must(t, h.apply(fake(1), policy.Net{Weight: 1}))
	for i := range uint64(identity.Max) - 1 {
		must(t, testkit.Err(h.slots.Take(identity.Tenant{NetNS: 1<<50 + i})))
	}
	before, entries := h.state(), len(h.journal.Entries())
	testkit.Is(t, "no slot is left", h.apply(fake(2), policy.Net{Weight: 1}), identity.ErrFull)
	if h.state() != before || len(h.journal.Entries()) != entries || len(h.classes()) != 3 {
		t.Errorf("refused, but changed: classes %v\n%swas\n%s%+v", h.classes(), h.state(), before, h.journal.Entries())
	}
	must(t, h.apply(fake(1), policy.Net{Rate: 100 * mbit}))
	if got := h.classes(); got[1] != 100*mbit {
		t.Errorf("who has a slot: classes %v", got)
	}
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
}

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

// Each system call fails once.
func TestFaults(t *testing.T) {
	testkit.Later(t)
	needSharing(t)
	t.Parallel()
	h := newHost(t, gbit)
	h.bridge()
	_, one := h.add("one", "10.66.0.2/24", h.ns)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
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

// A failed write of ours does not count as a change by others, however often it fails.
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
