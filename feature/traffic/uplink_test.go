package traffic_test

import (
	"errors"
	"maps"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// TestSeveralUplinks has a host with two uplinks, the second one slower. Each is divided separately,
// and a rate has to fit both.
func TestSeveralUplinks(t *testing.T) {
	h := newHost(t, gbit)
	h.others = map[string]uint64{"nic1": 100 * mbit}
	h.listen()
	far := h.Create(sandbox.Spec{Name: "trfar", Bare: true})
	must(t, sandbox.Wire(sandbox.End{Box: far, Name: "far"}, sandbox.End{Box: h.ns, Name: "nic1"}))
	box, c := h.routed()
	h.Address(far, "far", "10.70.0.1/24")
	h.Address(h.ns, "nic1", "10.70.0.254/24")
	h.Route(far, "10.67.0.0/24", "10.70.0.254")
	h.Address(h.wire, "wire", "fd66::1/64") // and by the second IPv6
	for box, addr := range map[*sandbox.Box]string{far: "fd70::1/64", h.ns: "fd70::254/64"} {
		h.Address(box, map[*sandbox.Box]string{far: "far", h.ns: "nic1"}[box], addr)
	}
	h.Address(h.ns, "br0", "fd67::1/64")
	h.Address(box, "eth0", "fd67::2/64")
	must(t, h.ns.Sysctl("ipv6/conf/all/forwarding", "1"))
	h.Route(box, "::/0", "fd67::1")
	h.Route(far, "fd67::/64", "fd70::254")
	must(t, far.Do(func() error {
		in, err := net.ListenPacket("udp", ":9000")
		if err == nil {
			t.Cleanup(func() { in.Close() })
		}
		return err
	}))
	h.start()
	nic1 := qdisc.Root(h.Open(h.ns), h.Index(h.ns, "nic1"))
	state := func() string {
		v, err := nic1.Read()
		must(t, err)
		return h.state() + v
	}
	before := state()

	// What exceeds the slower uplink is refused, and changes neither.
	var r *model.Refusal
	if err := h.apply(c, policy.Net{Rate: 96 * mbit}); !errors.As(err, &r) || !strings.Contains(err.Error(), "uplink nic1: rate refused") || state() != before {
		t.Fatalf("%v\n%swas\n%s", err, state(), before)
	}
	must(t, h.apply(c, policy.Net{Rate: 95 * mbit}))
	guarantees, err := h.traffic.Guarantees()
	if want := (map[string]uint64{"egress-mbit": 95, "ingress-mbit": 90}); !maps.Equal(guarantees, want) || err != nil {
		t.Errorf("can be guaranteed: %v, %v; want %v", guarantees, err, want)
	}
	must(t, h.apply(fake(1), policy.Net{Weight: 1}))
	packets := func(uplink string, id container.ID) func() uint64 {
		return func() uint64 {
			for _, row := range h.traffic.Read().Rows {
				if row.Uplink == uplink && row.Container == api.ID(id) && row.Direction == "egress" {
					return row.Packets
				}
			}
			t.Fatalf("no class of %v at %s: %+v", id, uplink, h.traffic.Read().Rows)
			return 0
		}
	}
	for _, by := range []struct{ to, uplink, not string }{
		{"10.66.0.1:9000", "nic0", "nic1"},
		{"10.70.0.1:9000", "nic1", "nic0"},
		{"[fd70::1]:9000", "nic1", "nic0"},
	} {
		own, other, rest := packets(by.uplink, c.ID), packets(by.not, c.ID), packets(by.uplink, 0)
		at := h.wire
		if by.uplink == "nic1" {
			at = far
		}
		h.resolve(box, at, by.to)
		was, elsewhere, everybody := own(), other(), rest()
		sent := h.send(box, by.to)
		if n := counted(own, was, sent); n < sent || n > sent+sent/4 {
			t.Errorf("%d packets were sent to %s, %d are in the class at %s", sent, by.to, n, by.uplink)
		}
		if n := other() - elsewhere; n > 5 {
			t.Errorf("%d packets of those to %s are at %s", n, by.to, by.not)
		}
		if n := rest() - everybody; n > sent/4 {
			t.Errorf("%d packets of those to %s are everybody's", n, by.to)
		}
	}

	// After one uplink goes, the other is divided as before.
	must(t, h.ns.Delete("nic1"))
	testkit.Fails(t, "one of two has gone", h.apply(c, policy.Net{Rate: 96 * mbit}), "there is no uplink nic1")
	if got := h.classes(); len(got) != 4 || got[uint16(h.slots.Lookup(c.TenantKey()))] != 96*mbit {
		t.Errorf("classes %v", got)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
	if !strings.HasPrefix(before, h.state()) || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end:\n%swas\n%s%+v", h.state(), before, h.journal.Entries())
	}
}

// examined returns the feature's finding for an uplink.
func (h *host) examined(device string) probe.Finding {
	h.t.Helper()
	for _, f := range h.traffic.Examine() {
		if f.Capability == device {
			return f
		}
	}
	h.t.Fatalf("nothing of %s: %+v", device, h.traffic.Examine())
	return probe.Finding{}
}

// Each uplink has a line with the source of its rate.
func TestRateComesFrom(t *testing.T) {
	h := newHost(t, gbit)
	h.others = map[string]uint64{"vx0": 0, "nic7": 0}
	h.tunnelled(false, false)
	h.start()
	if f := h.examined("nic0"); f.Level != probe.Full || f.Detail != "1gbit, as the operator says" {
		t.Errorf("%+v", f)
	}
	if f := h.examined("vx0"); f.Level != probe.Degraded || !strings.Contains(f.Why, "not known") || !strings.Contains(f.Mend, "--uplink vx0=1gbit") {
		t.Errorf("%+v", f)
	}
	testkit.Same(t, "nic7", probe.Unavailable, h.examined("nic7").Level)
	h.rate, h.others = 0, map[string]uint64{"nic0": 0}
	h.restart()
	if f := h.examined("nic0"); f.Level != probe.Full || f.Detail != "10gbit, as its driver says" { // as for each veth
		t.Errorf("%+v", f)
	}
}

// unrated makes a host with an uplink that reports no rate, as in virtual machines: a tunnel.
func unrated(t *testing.T) (*host, way) {
	h := newHost(t, 0)
	h.others = map[string]uint64{"vx0": 0}
	box, c := h.tunnelled(false, false)
	return h, way{box: box, c: c, to: "10.69.0.1", at: h.wire}
}

// Without the uplink's rate, a ceil, a weight and a priority still hold.
func TestCeilWithoutRate(t *testing.T) {
	h, w := unrated(t)
	h.start()
	before := h.state()
	got, to := h.take(w.at), w.to+":9000"
	h.resolve(w.box, w.at, to)
	first := 0
	mostly(t, h.apply(w.c, policy.Net{Ceil: slow, Weight: 3, Priority: &first}))
	classes := h.classesOf(h.ns, "vx0")
	own, others := classes[h.minor(w.c)], classes[qdisc.MinorDefault]
	if own.ceil != slow || others.ceil <= 100*gbit || own.prio >= others.prio || own.rate <= 2*others.rate {
		t.Errorf("its class is %+v, that of the others %+v", own, others)
	}
	if took := h.held(w.box, to, got); took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	for _, row := range h.traffic.Read().Rows {
		if row.Uplink == "vx0" && (row.Link != 0 || row.Guaranteed != 0) {
			t.Errorf("nobody knows the rate, and so there is no guarantee: %+v", row)
		}
	}
	h.removes(before, w.c.ID)
}

// Keys that need the link's rate report that, and how to set it; the others do not.
func TestUnkeptWithoutRate(t *testing.T) {
	h, w := unrated(t)
	h.start()
	apply := func(egress, ingress policy.Net) string {
		t.Helper()
		err := h.traffic.Apply(t.Context(), policy.Target{Container: w.c, Settings: policy.Settings{Egress: egress, Ingress: ingress}})
		if err == nil {
			return ""
		}
		return err.Error()
	}
	for _, tt := range []struct {
		egress, ingress policy.Net
		unkept          string
	}{
		{egress: policy.Net{Rate: mbit, Ceil: slow, Latency: time.Millisecond}, unkept: "uplink vx0: net.rate, net.latency are not kept, "},
		{egress: policy.Net{Ceil: slow}, ingress: policy.Net{Weight: 2, Ceil: slow}, unkept: "uplink vx0: net.ingress.weight is not kept, "},
		{egress: policy.Net{Ceil: slow}, ingress: policy.Net{Ceil: slow}},
	} {
		got := apply(tt.egress, tt.ingress)
		if (got == "") != (tt.unkept == "") || !strings.Contains(got, tt.unkept) || tt.unkept != "" && !strings.Contains(got, "--uplink vx0=1gbit") {
			t.Errorf("%+v, %+v: %q, want %q", tt.egress, tt.ingress, got, tt.unkept)
		}
		if got := h.classesOf(h.ns, "vx0")[h.minor(w.c)].ceil; tt.egress.Rate > 0 && got != slow {
			t.Errorf("%+v: the ceil is %d, want %d", tt.egress, got, slow)
		}
		if tt.ingress.Ceil > 0 {
			if got := h.classesOf(h.ns, "hone")[qdisc.MinorDefault].ceil; got != slow {
				t.Errorf("%+v: the ceil of what it receives is %d, want %d", tt.ingress, got, slow)
			}
		}
	}
	must(t, h.traffic.Remove(t.Context(), w.c.ID))
	testkit.None(t, "in the end", h.journal.Entries())
}

// A host without hardware, such as a container that runs containers, has no uplink: only a ceil holds.
func TestCeilWithoutUplink(t *testing.T) {
	needSharing(t)
	h := newHost(t, 0)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	near, _ := h.add("two", "10.66.0.3/24", h.ns)
	got := h.take(near)
	h.start()
	before := h.state()
	must(t, h.due(c, policy.Net{Ceil: slow}, policy.Net{Ceil: slow}))
	if took := h.held(box, "10.66.0.3:9000", got); took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	rows := h.traffic.Read().Rows
	if len(rows) != 2 || rows[0].Direction == rows[1].Direction || rows[0].Ceil != slow || rows[1].Ceil != slow {
		t.Errorf("rows %+v", rows)
	}
	for _, n := range []policy.Net{{Weight: 1}, {Ceil: slow, Rate: mbit}} {
		if err := h.apply(c, n); err == nil || !strings.Contains(err.Error(), "no uplink") {
			t.Errorf("%+v: %v", n, err)
		}
	}
	h.removes(before, c.ID)
}
