package latency

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// packets is how many requests a test makes.
const packets = 100

// Each request and reply is measured once: on the right container, in the right
// direction and protocol, over all stages.
func TestBridge(t *testing.T) {
	testkit.Smoke(t)
	h, web, c := newBridged(t)
	_, other := h.add("other", "10.66.0.3/24", h.ns)
	h.measure(true, c, other)
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", packets)
	h.settled(c, UDP, Egress, packets)
	h.settled(c, UDP, Ingress, packets)
	h.whole(c, UDP)
	h.nothing(other)
}

// settled waits until as many packets as a test has sent are accounted for.
func (h *host) settled(c container.Container, p Protocol, d Direction, sent uint64) {
	h.T.Helper()
	h.await(func() string {
		x := h.read(c).Of(d, p)
		if x.Matched >= sent {
			return ""
		}
		return fmt.Sprintf("%v %v: %+v, waiting %d; want %d matched", d, p, x, x.Waiting(), sent)
	})
}

// whole checks that packets of a protocol were measured over all of their way, and
// that the stages come to the sums.
func (h *host) whole(c container.Container, p Protocol) {
	h.T.Helper()
	x := h.read(c)
	for d := range directions {
		cov := x.Of(d, p)
		if cov.Matched != cov.Seen || cov.Matched == 0 {
			h.T.Errorf("%v: not all are matched: %+v", d, cov)
		}
		var parts, added uint64
		for _, s := range way(d) {
			part := x.Histogram(d, s, p)
			if part.Count() != cov.Matched {
				h.T.Errorf("%v: %d packets in stage %s, want %d", d, part.Count(), s.Name(d), cov.Matched)
			}
			parts += part.Sum
			if s != Socket && !(d == Egress && s == First) {
				added += part.Sum
			}
		}
		for s, sum := range map[Stage]uint64{Added: added, Stack: parts} {
			all := x.Histogram(d, s, p)
			if all.Count() != cov.Matched {
				h.T.Errorf("%v: %d packets in %s, want %d", d, all.Count(), s.Name(d), cov.Matched)
			}
			testkit.Same(h.T, fmt.Sprintf("%v: %s: ns", d, s.Name(d)), sum, all.Sum)
		}
	}
}

// nothing checks that a container has no IPv4 traffic in its tallies.
func (h *host) nothing(c container.Container) {
	h.T.Helper()
	x := h.read(c)
	for d := range directions {
		testkit.Same(h.T, fmt.Sprintf("the neighbour has packets: %v", d), (Coverage{}), x.Of(d, TCP, UDP))
	}
}

// What is held on purpose in one stage shows there, and in no other.
func TestHeld(t *testing.T) {
	testkit.NeedRoot(t)
	t.Parallel()
	for _, tt := range []struct {
		name, dev string
		inside    bool // the device is the container's
		d         Direction
		s         Stage
		added     bool // the sum has it
	}{
		{"container's device", "eth0", true, Egress, First, false},
		{"uplink", "nic0", false, Egress, QDisc, true},
		{"host end", "hweb", false, Ingress, QDisc, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h, web, c := newBridged(t)
			from, to, addr := web, h.wire, "10.66.0.1:9000"
			if tt.d == Ingress {
				from, to, addr = h.wire, web, "10.66.0.2:9000"
			}
			h.measure(true, c)
			h.ask(from, to, "udp", addr, 3) // addresses are known from here on
			at := h.ns
			if tt.inside {
				at = web
			}
			h.hold(at, tt.dev)
			before := h.read(c)
			h.Load(from, nil, "udp-send", "--to", addr, "--count", "5", "--size", "1000")
			// HTB lends the first ones their time; each that follows takes two seconds.
			const long = 30 // 2^30 ns is 1.07 s
			// Of one reading, and again if not so: packets go on while it is made.
			h.await(func() string {
				now := h.read(c)
				count := func(s Stage) uint64 {
					n := now.Histogram(tt.d, s, UDP).Since(before.Histogram(tt.d, s, UDP))
					return n.Count() - n.Below(long)
				}
				held := count(tt.s)
				if held == 0 {
					return fmt.Sprintf("nothing was held in stage %s: %+v", tt.s.Name(tt.d), now.Of(tt.d, UDP))
				}
				for _, s := range append(way(tt.d), Added, Stack) {
					if s == tt.s || s == Socket || s == Stack && tt.d == Ingress {
						continue // no socket listens
					}
					want := uint64(0)
					if s == Stack || s == Added && tt.added {
						want = held
					}
					if got := count(s); got != want {
						return fmt.Sprintf("stage %s has %d packets that were held, want %d", s.Name(tt.d), got, want)
					}
				}
				return ""
			})
		})
	}
}

// hold has a device send no more than 500 bytes a second.
func (h *host) hold(b *sandbox.Box, dev string) {
	h.T.Helper()
	h.Change(b, dev, func(n *netlink.Handle, l netlink.Link) error {
		index, rate := l.Attrs().Index, uint64(4000)
		root := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT})
		root.Defcls = 1
		if err := n.QdiscAdd(root); err != nil {
			return err
		}
		attrs := netlink.ClassAttrs{LinkIndex: index, Parent: root.Handle, Handle: netlink.MakeHandle(1, 1)}
		return n.ClassAdd(netlink.NewHtbClass(attrs, netlink.HtbClassAttrs{Rate: rate, Ceil: rate, Buffer: 1600, Cbuffer: 1600}))
	})
}

// Without a measured container nothing is attached. Packets of other containers are not looked at. A
// loaded object serves the next container, unless it has recorded packets.
func TestUnused(t *testing.T) {
	h, _, c := newBridged(t)
	h.measure(false, c)
	if h.f.meter != nil {
		t.Error("programs are attached before any container is measured")
	}
	h.measure(true, c)
	h.measure(true, c)
	if programs, sockets := h.f.meter.attached(); programs != 4 || sockets != 1 {
		t.Errorf("%d programs, %d at sockets; want 4 and 1", programs, sockets)
	}
	h.measure(false, c)
	idle := h.f.idle
	if programs, sockets := idle.attached(); h.f.meter != nil || programs != 0 || sockets != 0 {
		t.Errorf("%d programs, %d at sockets, after the last container has gone", programs, sockets)
	}
	h.measure(true, c)
	if programs, sockets := idle.attached(); h.f.meter != idle || programs != 4 || sockets != 1 {
		t.Errorf("%d programs, %d at sockets of what was loaded; want 4 and 1", programs, sockets)
	}
	must(t, h.f.Remove(t.Context(), c.ID))
	must(t, h.f.Remove(t.Context(), c.ID))
	if h.f.meter != nil {
		t.Error("programs are attached after Remove")
	}
	h.f.unload()
	if h.f.idle != nil {
		t.Error("programs are loaded after some time")
	}
	h.measure(true, c)
	_, _, err := h.f.record(c.ID, false, api.LatencyFilter{}, time.Minute)
	must(t, err)
	h.measure(false, c)
	if h.f.idle != nil {
		t.Error("the next container could see what was recorded")
	}
}

// The members of a pod are one tenant. It is measured until the last of them has left, or has moved
// to another network.
func TestPod(t *testing.T) {
	h, _, c := newBridged(t)
	_, moved := h.add("other", "10.66.0.3/24", h.ns)
	side := c
	side.ID += 1 << 40
	h.measure(true, c, side)
	slot := h.f.of(c.ID).slot
	if x := h.read(side); x.Container != c.ID || len(x.Members) != 2 || h.f.of(side.ID).slot != slot {
		t.Errorf("two members: %+v of slot %d", x.Members, h.f.of(side.ID).slot)
	}
	must(t, h.f.Remove(t.Context(), c.ID))
	if m := h.f.of(side.ID); m == nil || m.slot != slot || h.f.of(c.ID) != nil {
		t.Errorf("the first member has left: %+v", m)
	}
	moved.ID = side.ID
	h.measure(true, moved)
	if m := h.f.of(side.ID); m == nil || m.slot == slot || len(h.f.meter.tallies) != 1 || len(h.f.measured) != 1 {
		t.Errorf("the other has moved: %+v, %d tallies, %d tenants", m, len(h.f.meter.tallies), len(h.f.measured))
	}
	h.measure(false, moved)
	if h.f.meter != nil {
		t.Error("programs are attached after the last member has left")
	}
}
