package overlay

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// denial is a change after which no packet of a flow from node 0 to node 1 may be delivered.
type denial struct {
	name string
	form string       // "": all
	at   int          // node
	told netdev.Cause // "": the kernel reports nothing
	size int          // of the datagrams; 0: small
	do   func(r *rig, n *node)
	then func(r *rig, n *node) // once the flow is fast with that; nil: nothing
	undo func(r *rig, n *node)
}

func (n *node) run(t testing.TB, command string, args ...string) {
	t.Helper()
	run(t, n.inside, command, args...)
}

func run(t testing.TB, b *sandbox.Box, command string, args ...string) {
	t.Helper()
	must(t, b.Do(func() error {
		if out, err := exec.Command(command, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %q: %w: %s", command, args, err, out)
		}
		return nil
	}))
}

// drops adds rules that drop the datagrams to a sink, on the path of the form.
func (r *rig) drops(n *node) {
	r.T.Helper()
	n.nft(r.T, "table "+r.family()+" fl_deny { chain f { type filter hook forward priority 0; udp dport 9001 drop; }; }")
}

func (r *rig) undrops(n *node) {
	r.T.Helper()
	n.nft(r.T, "delete table "+r.family()+" fl_deny")
}

func (r *rig) family() string {
	if r.form == routed {
		return "inet"
	}
	return "bridge"
}

func (r *rig) mtu(n *node, mtu int) {
	r.T.Helper()
	r.Change(n.inside, "vx0", func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetMTU(l, mtu) })
}

// filter attaches a filter that drops everything at a device's egress.
func (r *rig) filter(n *node, dev string) {
	r.T.Helper()
	n.run(r.T, "tc", "qdisc", "replace", "dev", dev, "clsact")
	n.run(r.T, "tc", "filter", "add", "dev", dev, "egress", "bpf", "direct-action", "bytecode", "1,6 0 0 2") // TC_ACT_SHOT
}

func denials() []denial {
	return []denial{
		{name: "nft drop where it is sent", at: 0, told: netdev.NFTChanged, do: (*rig).drops, undo: (*rig).undrops},
		{name: "nft drop where it arrives", at: 1, told: netdev.NFTChanged, do: (*rig).drops, undo: (*rig).undrops},
		{name: "route withdrawn", form: routed, at: 0, told: netdev.RouteChanged,
			do: func(r *rig, n *node) { n.run(r.T, "ip", "route", "del", "10.244.1.0/24") },
			undo: func(r *rig, n *node) {
				n.run(r.T, "ip", "route", "add", "10.244.1.0/24", "via", "10.244.1.0", "dev", "vx0", "onlink")
			}},
		{name: "mtu of the tunnel lowered", at: 0, told: netdev.LinkChanged, size: 1350,
			do: func(r *rig, n *node) { r.mtu(n, 1300) }, undo: func(r *rig, n *node) { r.mtu(n, 1450) }},
		{name: "filter at the host end", at: 1, told: netdev.FilterChanged,
			do: func(r *rig, n *node) { r.filter(n, "veth0") }, undo: func(r *rig, n *node) { n.run(r.T, "tc", "qdisc", "del", "dev", "veth0", "clsact") }},
		{name: "filter at the tunnel device", at: 0, told: netdev.FilterChanged,
			do: func(r *rig, n *node) { r.filter(n, "vx0") }, undo: func(r *rig, n *node) { n.run(r.T, "tc", "qdisc", "del", "dev", "vx0", "clsact") }},
		{name: "iptables-legacy", form: routed, at: 0,
			do: func(r *rig, n *node) {
				n.run(r.T, "iptables-legacy", "-w", "-A", "FORWARD", "-p", "udp", "--dport", "9001", "-j", "DROP")
			},
			undo: func(r *rig, n *node) { n.run(r.T, "iptables-legacy", "-w", "-F", "FORWARD") }},
		{name: "sysctl", form: routed, at: 1,
			do:   func(r *rig, n *node) { must(r.T, n.inside.Sysctl("ipv4/conf/vx0/forwarding", "0")) },
			undo: func(r *rig, n *node) { must(r.T, n.inside.Sysctl("ipv4/conf/vx0/forwarding", "1")) }},
		{name: "nft drop soon after another rule", at: 1,
			do:   func(r *rig, n *node) { n.told(r.T, netdev.NFTChanged, func() { n.nft(r.T, "table inet fl_other {}") }) },
			then: (*rig).drops, undo: (*rig).undrops},
	}
}

// After a change that denies a flow, no packet of it is delivered: once the feature has followed the
// change, or, without an event, once the lease is over. When the change is undone the flow continues,
// and is fast again.
func TestDenied(t *testing.T) {
	testkit.Later(t)
	t.Parallel()
	for _, form := range testkit.Cases(t, 1, routed, bridged, apart) {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, form)
			r.onTracked()
			to := newSink(t, r.nodes[1].web)
			for _, d := range denials() {
				if d.form != "" && d.form != form {
					continue
				}
				t.Run(d.name, func(t *testing.T) {
					r.T = t
					r.denied(d, to)
				})
			}
		})
	}
}

// denied checks that a denial stops a flow to a sink, and that the flow continues afterwards.
func (r *rig) denied(d denial, to *sink) {
	t := r.T
	t.Helper()
	n := r.nodes[d.at]
	s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
	s.size = max(s.size, d.size)
	r.quick(s)
	by := func(what func(*rig, *node)) {
		t.Helper()
		if d.told == "" {
			what(r, n)
			return
		}
		n.told(t, d.told, func() { t.Helper(); what(r, n) })
	}
	if by(d.do); d.told == "" {
		if d.then != nil {
			r.quick(s) // established connections stay
			d.then(r, n)
		}
		began, last := time.Now(), time.Duration(0)
		for time.Since(began) < lease+coarse {
			if s.call(10 * time.Millisecond) {
				last = time.Since(began)
			}
		}
		t.Logf("the last datagram went %v after the change", last)
	}
	first := s.sent + 1
	for range 10 {
		s.push()
	}
	s.call(10 * time.Millisecond)
	end := s.sent
	by(d.undo)
	r.quick(s)
	for _, number := range to.of(s) {
		if number >= first && number <= end {
			t.Errorf("datagram %d was delivered; denied were %d to %d", number, first, end)
		}
	}
}
