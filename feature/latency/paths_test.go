package latency

import (
	"fmt"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// masquerade makes the host a router with addresses of its own towards the wire.
func (h *host) masquerade() {
	h.T.Helper()
	must(h.T, h.ns.Bridge("br0", netip.MustParsePrefix("10.67.0.254/24")))
	h.Address(h.ns, "nic0", "10.66.0.254/24")
	must(h.T, h.ns.Sysctl("ipv4/ip_forward", "1"))
	must(h.T, h.ns.Do(func() error {
		out, err := exec.Command("iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "nic0", "-j", "MASQUERADE").CombinedOutput()
		if err != nil {
			return fmt.Errorf("iptables: %w: %s", err, out)
		}
		return nil
	}))
}

// overlay makes one as Docker does: VXLAN device and bridge in a namespace of their
// own, the tunnel's packets in the host's. Outside is 10.67.0.1.
func (h *host) overlay() *sandbox.Box {
	h.T.Helper()
	h.Address(h.ns, "nic0", "10.66.0.254/24")
	inside := h.Create(sandbox.Spec{Name: "latoverlay", Bare: true})
	must(h.T, inside.Bridge("br0", netip.MustParsePrefix("10.67.0.254/24")))
	h.Tunnel(h.ns, "", "10.66.0.1", sandbox.End{Box: inside, Bridge: "br0"})
	h.Tunnel(h.wire, "", "10.66.0.254", sandbox.End{Box: h.wire, Addr: netip.MustParsePrefix("10.67.0.1/24")})
	return inside
}

// macvlan makes a container with a device of its own on nic0.
func (h *host) macvlan() (*sandbox.Box, container.Container) {
	h.T.Helper()
	box := h.Create(sandbox.Spec{Name: "latmac"})
	dev := h.Macvlan(h.ns, sandbox.End{Box: box, Name: "mac0", Addr: netip.MustParsePrefix("10.66.0.2/24")})
	c := h.Describe(box)
	c.Interfaces = []container.Interface{dev}
	return box, c
}

// On each path the packets of a measured container are timed, both ways.
func TestPaths(t *testing.T) {
	testkit.NeedRoot(t)
	veth := map[Direction][]Stage{Egress: {First, Deliver, Forward, QDisc, Added, Stack}, Ingress: {First, Forward, QDisc, Deliver, Socket, Added, Stack}}
	for _, tt := range []struct {
		name, proto, to string
		make            func(*host) (*sandbox.Box, container.Container)
		stages          map[Direction][]Stage
	}{
		{"tcp", "tcp", "10.66.0.1:9000", func(h *host) (*sandbox.Box, container.Container) {
			h.bridge()
			return h.add("web", "10.66.0.2/24", h.ns)
		}, veth},
		{"ipv6", "udp", "[fd00:66::1]:9000", func(h *host) (*sandbox.Box, container.Container) {
			h.bridge()
			web, c := h.add("web", "10.66.0.2/24", h.ns)
			h.Address(h.wire, "wire", "fd00:66::1/64")
			h.Address(web, "eth0", "fd00:66::2/64")
			return web, c
		}, veth},
		{"masqueraded", "udp", "10.66.0.1:9000", func(h *host) (*sandbox.Box, container.Container) {
			h.masquerade()
			web, c := h.add("web", "10.67.0.2/24", h.ns)
			h.Route(web, "0.0.0.0/0", "10.67.0.254")
			return web, c
		}, veth},
		{"overlay", "udp", "10.67.0.1:9000", func(h *host) (*sandbox.Box, container.Container) {
			return h.add("web", "10.67.0.2/24", h.overlay())
		}, veth},
		{"macvlan", "udp", "10.66.0.1:9000", (*host).macvlan, map[Direction][]Stage{Egress: {First, Forward, QDisc, Added, Stack}, Ingress: {First, Socket, Stack}}},
		{"host", "udp", "10.66.0.1:9000", func(h *host) (*sandbox.Box, container.Container) {
			h.Address(h.ns, "nic0", "10.66.0.254/24")
			box := h.Create(sandbox.Spec{Name: "lathostmode", Network: h.ns})
			c := h.Describe(box)
			c.HostNetwork = true
			return box, c
		}, map[Direction][]Stage{Egress: {QDisc, Stack}, Ingress: {First, Socket, Stack}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			web, c := tt.make(h)
			h.measure(true, c)
			h.ask(web, h.wire, tt.proto, tt.to, packets)
			p := map[string]Protocol{"udp": UDP, "tcp": TCP}[tt.proto]
			h.settled(c, p, Egress, packets)
			h.settled(c, p, Ingress, packets)
			x := h.read(c)
			for d := range directions {
				cov := x.Of(d, p)
				if cov.Mismatched+cov.Evicted+cov.Local+cov.Unsampled > 0 {
					t.Errorf("%v: %+v", d, cov)
				}
				for s := range stages {
					n, want := x.Histogram(d, s, p).Count(), uint64(0)
					for _, expected := range tt.stages[d] {
						if expected == s {
							want = packets
						}
					}
					if n < want || want == 0 && n > 0 {
						t.Errorf("%v: %d packets in stage %s, want %d", d, n, s.Name(d), want)
					}
				}
			}
		})
	}
}

// Packets between two containers of the host are measured from device to device, and
// nowhere else.
func TestLocal(t *testing.T) {
	h, web, c := newBridged(t)
	db, other := h.add("db", "10.66.0.3/24", h.ns)
	h.measure(true, c, other)
	h.ask(web, db, "udp", "10.66.0.3:9000", packets)
	for _, who := range []container.Container{c, other} {
		h.await(func() string {
			x := h.read(who)
			for d := range directions {
				if cov := x.Of(d, UDP); cov.Local < packets || cov.Matched > 0 || cov.Mismatched > 0 {
					return fmt.Sprintf("%v: %+v, want %d local", d, cov, packets)
				}
				if n := x.Histogram(d, Local, UDP).Count(); n < packets {
					return fmt.Sprintf("%v: %d in the histogram, want %d", d, n, packets)
				}
				for _, s := range way(d) {
					if n := x.Histogram(d, s, UDP).Count(); n > 0 {
						t.Fatalf("%v: %d packets in stage %s", d, n, s.Name(d))
					}
				}
			}
			return ""
		})
	}
}

// A super-packet that the kernel cuts up for a device that cannot leaves in other skbs
// than it came in. It is measured once, when the first of them leaves.
func TestSplit(t *testing.T) {
	h, web, c := newBridged(t)
	must(t, h.Open(h.ns).Offload(h.Index(h.ns, "nic0"), netdev.TSO).Write(netdev.Off))
	softirqs := testkit.WatchSoftirqs(t)
	h.measure(true, c)
	h.Load(h.wire, nil, "rr-server", "--proto", "tcp", "--listen", "10.66.0.1:9000")
	const n, bytes = 20, 30000
	b, _ := h.Load(web, nil, "rr-client", "--proto", "tcp", "--to", "10.66.0.1:9000", "--conns", "1", "--rate", "1000", "--count", fmt.Sprint(n), "--size", fmt.Sprint(bytes))
	h.await(func() string {
		x := h.read(c)
		cov, added := x.Of(Egress, TCP), x.Histogram(Egress, Added, TCP).Count()
		// If no program was called at the end of a packet, it stays waiting.
		excused := cov.Waiting() <= softirqs.Missed()
		if got := b.Read().Since(load.Reading{}).Ops; got < n || cov.Matched+cov.Waiting() != cov.Seen || added != cov.Matched || !excused {
			return fmt.Sprintf("%d of %d requests answered; %+v, waiting %d; %d packets in added", got, n, cov, cov.Waiting(), added)
		}
		return ""
	})
}

// In a flood the programs are attached for a part of the time. A request for records ends that, and
// packets that began before have no record.
func TestTurns(t *testing.T) {
	h, web, c := newBridged(t)
	_, other := h.add("other", "10.66.0.3/24", h.ns)
	h.f.cfg.Budget = 100
	h.measure(true, c, other)
	flood, _ := h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	for range 2 { // it looks in between
		var before Reading
		h.await(func() string {
			r, err := h.f.Read()
			must(t, err)
			if before.Taken.IsZero() {
				before = r
			}
			since := r.Since(before)
			if since.Unwatched == 0 || since.Tenants[0].Of(Egress, UDP).Matched+since.Tenants[1].Of(Egress, UDP).Matched == 0 {
				return fmt.Sprintf("at rest for %v s: %+v", since.Unwatched, since.Tenants[0].Of(Egress, UDP))
			}
			return ""
		})
	}
	resting := func() bool {
		h.f.mu.Lock()
		defer h.f.mu.Unlock()
		programs, sockets := h.f.meter.attached()
		return programs == 0 && sockets == 0
	}
	h.await(func() string {
		if !resting() {
			return "the programs are attached"
		}
		return ""
	})
	_, ok, err := h.f.Trace(t.Context(), other.ID, false, api.LatencyFilter{}, 1, 0)
	if must(t, err); !ok || resting() {
		t.Errorf("at rest while somebody asks for records: measured %v", ok)
	}
	for range 20 { // whenever it is looked at
		h.f.mu.Lock()
		testkit.Gives(t, "rest while somebody asks for records", quiet)(h.f.nextPhase())
		h.f.mu.Unlock()
	}
	if flood.Read().Since(load.Reading{}).Ops == 0 {
		t.Error("there was no flood")
	}
}

// A container that ends while its packets are in flight leaves nothing behind, and the measurement of
// others continues.
func TestGone(t *testing.T) {
	h, web, c := newBridged(t)
	old, gone := h.add("old", "10.66.0.3/24", h.ns)
	h.measure(true, c, gone)
	h.Load(old, nil, "udp-send", "--to", "10.66.0.1:9001", "--rate", "1000")
	h.await(func() string {
		if h.read(gone).Of(Egress, UDP).Matched == 0 {
			return "nothing is sent"
		}
		return ""
	})
	must(t, old.Destroy())
	must(t, h.f.Remove(t.Context(), gone.ID))
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", packets)
	h.settled(c, UDP, Egress, packets)
	if programs, sockets := h.f.meter.attached(); programs != 4 || sockets != 1 || len(h.f.meter.tallies) != 1 {
		t.Errorf("%d programs, %d at sockets, %d tallies", programs, sockets, len(h.f.meter.tallies))
	}
}

// A CPU that has more packets than it measures passes some over, and counts that.
func TestBudget(t *testing.T) {
	h, web, c := newBridged(t)
	h.f.cfg.Budget = 100
	h.measure(true, c)
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	h.await(func() string {
		r, err := h.f.Read()
		must(t, err)
		if r.Passed < 1000 || r.Tenants[0].Of(Egress, UDP).Matched == 0 {
			return fmt.Sprintf("%d passed over, %+v", r.Passed, r.Tenants[0].Of(Egress, UDP))
		}
		return ""
	})
}
