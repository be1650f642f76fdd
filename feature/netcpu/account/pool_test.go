package account

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/bypass"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// flood sends n packets from outside as fast as it can.
func (f *fabric) flood(n int, to string) {
	f.t.Helper()
	f.load(f.wire, 1, "udp-send", "--to", to, "--size", fmt.Sprint(payload), "--count", fmt.Sprint(n))
}

// states returns the state of each CPU.
func (l *lab) states() (all []accountCpu) {
	l.t.Helper()
	must(l.t, l.m.maps.FlCpus.Lookup(uint32(0), &all))
	return all
}

// On a busy CPU only some runs are sampled. Packets that look like a tunnel's, without a tunnel
// that unpacks them, do not change that: any host can send them.
func TestSampledDespiteForged(t *testing.T) {
	f := newFabric(t, newMeter(t))
	box := f.add("box", 2)
	f.load(box, 1, "udp-recv", "--listen", ":9000")
	forged := f.load(f.wire, 1, "udp-send", "--to", "10.66.0.254:4789", "--rate", "500", "--size", fmt.Sprint(payload))
	f.got(forged, packets)
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000", "--size", fmt.Sprint(payload))
	f.await(func() string {
		for _, s := range f.states() {
			if s.TunnelUsed != 0 {
				t.Fatal("what only looks as a tunnel's packet is taken for one that came out of it")
			}
		}
		if w := f.states()[0].Weight; w <= 1 {
			return fmt.Sprintf("CPU 0 has weight %d beside forged packets of a tunnel", w)
		}
		return ""
	})
}

// Runs with a tunnel device's packets are never skipped, also on a busy CPU.
func TestExactBehindTunnel(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, newMeter(t))
	box := f.inOverlay(f.overlay(), "box", 2)
	r := f.receive(box, 1, ":9000")
	// The first packet resolves the address: few wait for that.
	f.send(f.wire, 1, 1, "udp-send", "10.67.0.2:9000")
	f.got(r, 1)
	const n = 2000
	f.flood(n-1, "10.67.0.2:9000")
	f.got(r, n)
	f.expect(func(d delta) {
		d.received(box, UDP, n, n*sizeUDP4)
		// All packets of one softirq (netdev_budget) can arrive before the first one comes out of
		// the tunnel; if none came out in the last second, they are the system's.
		const budget = 300
		if e := d.of(box).Receive[Encapsulated].Packets; e < n-budget {
			d.t.Errorf("for the tunnel's work it is charged %d of %d packets", e, n)
		}
	})
	if f.states()[0].TunnelUsed == 0 {
		t.Error("CPU 0 has seen nothing come out of the tunnel")
	}
}

// TestStampOfAnother has a wire that keeps the stamp of another agent on the same kernel, like a veth
// between two nodes of kind. The receiver owns the packet, even behind a tunnel.
func TestStampOfAnother(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	inner := f.inOverlay(f.overlay(), "inner", 4)
	r, in := f.receive(box, 0, ":9000"), f.receive(inner, 0, ":9000")
	f.send(f.wire, 1, 1, "udp-send", "10.67.0.4:9000") // resolves the address
	f.got(in, 1)

	there := exactMeter(t)
	const third = 1<<40 + 3 // as other is here
	for id := container.ID(1<<40 + 1); id <= third; id++ {
		must(t, there.Watch(identity.Member{ID: id}))
	}
	var stamps hook.Set
	defer stamps.Close()
	d := f.device(f.wire, "wire", false)
	at := hook.Place{Device: container.Device{NetNS: d.Netns, Index: d.Ifindex}, Egress: true, Name: "stamp", Owner: f.m.cfg.Owner}
	must(t, stamps.PutCopy(f.m.cfg.Ends, at, func() (*bpf.Copy, error) { return there.stampOf(there.accounts[third]) }))

	f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000")
	f.send(f.wire, 1, packets, "udp-send", "10.67.0.4:9000")
	f.got(r, packets)
	f.got(in, packets+1)
	f.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		d.received(inner, UDP, packets+1, (packets+1)*sizeUDP4)
		for _, b := range []*sandbox.Box{box, other, inner} {
			if sent := d.of(b).Send[UDP]; sent != (Work{}) {
				d.t.Errorf("%s sent %+v, want nothing: another agent stamped it", b.Name, sent)
			}
		}
	})
}

// Packets of another NIC carry no part of the cost of a tunnel's packets.
func TestSecondNIC(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	other := f.bare("other")
	f.lab.wire(sandbox.End{Box: other, Name: "wire", Addr: prefix("10.66.0.9/24")},
		sandbox.End{Box: f.host, Name: "nic1", Bridge: "br0"}, "1")
	box := f.add("box", 2)
	receivers := []*load.Board{f.receive(box, 0, ":9000"), f.receive(f.host, 0, ":4789")}
	f.send(f.wire, 1, packets, "udp-send", "10.66.0.254:4789")
	f.send(other, 1, packets, "udp-send", "10.66.0.2:9000")
	for _, r := range receivers {
		f.got(r, packets)
	}
	f.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		if e := d.of(box).Receive[Encapsulated]; e != (Work{}) || d.system().Receive[Encapsulated].CPU <= 0 {
			d.t.Errorf("by a plain NIC the container is charged %+v for a tunnel, the system %+v", e, d.system().Receive[Encapsulated])
		}
	})
}

// newTunnelled makes a host with a VXLAN as Flannel builds it: 10.67.0.0/24, with bridge and host
// ends in the host's namespace. Outside is 10.67.0.1.
func newTunnelled(t testing.TB, m *Meter) *fabric {
	t.Helper()
	f := newHost(t, m)
	f.lab.wire(sandbox.End{Box: f.wire, Name: "wire", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: f.host, Name: "nic0", Addr: prefix("10.66.0.254/24")}, "1")
	f.world(f.wire, "wire")
	f.bridge(f.host, "10.67.0.254/24")
	f.Tunnel(f.host, "", "10.66.0.1", sandbox.End{Box: f.host, Bridge: "br0"})
	f.Tunnel(f.wire, "", "10.66.0.254", sandbox.End{Box: f.wire, Addr: prefix("10.67.0.1/24")})
	return f
}

// inTunnel adds a container with the address 10.67.0.n. The world has a neighbour entry for it, and
// sends no question.
func (f *fabric) inTunnel(name string, n int) *sandbox.Box {
	f.t.Helper()
	box := f.inOverlay(f.host, name, n)
	own, world := f.MAC(box, "eth0"), f.MAC(f.wire, "vx0")
	must(f.t, box.Neighbour("eth0", netip.MustParseAddr("10.67.0.1"), world))
	must(f.t, f.wire.Neighbour("vx0", netip.AddrFrom4([4]byte{10, 67, 0, byte(n)}), own))
	must(f.t, f.host.Forward("vx0", world))
	must(f.t, f.host.Forward(fmt.Sprintf("h%d", n), own))
	return box
}

// attach attaches a program to a device's ingress, after the programs of the accounts.
func (l *lab) attach(b *sandbox.Box, dev string, stage qdisc.Stage, program func() (*ebpf.Program, error)) {
	l.t.Helper()
	var s hook.Set
	l.t.Cleanup(func() { must(l.t, s.Close()) })
	at := hook.Place{Device: container.Device{NetNS: l.Open(b).Inode(), Index: l.Index(b, dev)}, Stage: stage, Name: "bypass"}
	must(l.t, s.Put(l.m.cfg.Ends, at, program))
}

// unpacks redirects packets of the tunnel at the NIC into the box behind a host end, past tunnel,
// bridge and backlog, with or without a report to the accounts.
func (f *fabric) unpacks(box *sandbox.Box, end string, tells bool) {
	f.t.Helper()
	var tenant identity.Slot
	if tells {
		tenant = f.m.cfg.Identity.Lookup(identity.Tenant{NetNS: f.Open(box).Inode()})
	}
	f.attach(f.host, "nic0", hook.Redirect, bypass.Unpack(f.m.cfg.Identity.Maps(), f.Index(f.host, end), tenant))
}

// A packet that is redirected into a container is seen nowhere after the NIC. With a report it is
// the container's, as on the slow path; without one it is the system's.
func TestHandedOver(t *testing.T) {
	testkit.InFull(t)
	m := exactMeter(t)
	for _, c := range []struct {
		name               string
		fast, tells, polls bool
	}{ // in this order: what waits in the pool becomes the system's only after a while
		{"told", true, true, false}, {"told, polled", true, true, true}, {"slow", false, false, false}, {"not told", true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newTunnelled(t, m)
			box, other := f.inTunnel("box", 2), f.inTunnel("other", 3)
			if c.polls {
				f.polls()
			}
			if c.fast {
				f.unpacks(box, "h2", c.tells)
			}
			r := f.receive(box, 1, ":9000")
			f.send(f.wire, 1, 1, "udp-send", "10.67.0.2:9000") // one leaves the tunnel
			f.got(r, 1)
			n := uint64(2000)
			if c.polls { // the ring has no room for a flood
				n = 1 + packets
				f.send(f.wire, 1, packets, "udp-send", "10.67.0.2:9000")
			} else {
				f.flood(int(n)-1, "10.67.0.2:9000")
			}
			f.got(r, n)
			var share float64
			f.expect(func(d delta) {
				got, system := d.of(box).Receive, d.system().Receive
				d.nothing(other)
				if c.fast && !c.tells {
					if got[UDP] != (Work{}) || got[Encapsulated] != (Work{}) || system[Encapsulated].CPU <= 0 {
						d.t.Errorf("the container is charged %+v, the system %+v", got, system)
					}
					return
				}
				d.received(box, UDP, n, n*sizeUDP4)
				d.robs(box)
				if c.fast && (got[Encapsulated] != (Work{}) || system[Encapsulated].CPU != 0 || system[UDP] != (Work{})) {
					d.t.Errorf("for the tunnel the container is charged %+v, the system %+v", got, system)
				}
				share = d.of(box).CPU().Seconds() / (d.of(box).CPU() + d.system().CPU()).Seconds()
			})
			t.Logf("the container is charged %.1f %% of what it and the system are", 100*share)
		})
	}
}

// A container that replies in the softirq of the received packet is charged for both.
func TestHandedOverTCP(t *testing.T) {
	testkit.InFull(t)
	f := newTunnelled(t, exactMeter(t))
	box := f.inTunnel("box", 2)
	f.segmented(f.wire, "vx0")
	f.unpacks(box, "h2", true)
	r := f.load(box, 0, "tcp-recv", "--listen", ":9000")
	f.send(f.wire, 1, writes, "tcp-send", "10.67.0.2:9000")
	f.gotBytes(r, stream)
	f.expect(func(d delta) {
		a := d.of(box)
		d.streamed(a.Receive[TCP], a.Send[TCP], stream)
		if a.Receive[UDP] != (Work{}) || a.Receive[Encapsulated] != (Work{}) {
			d.t.Errorf("for what it came in the container is charged %+v", a.Receive)
		}
	})
}

// A packet redirected to a tenant without an account is the system's, at once.
func TestHandedOverToNobody(t *testing.T) {
	testkit.InFull(t)
	f := newTunnelled(t, exactMeter(t))
	box := f.inTunnel("box", 2)
	f.unpacks(box, "h2", true)
	must(t, f.m.Forget(f.ids[box]))
	f.began = f.read()
	f.datagrams(f.wire, box, 1, "10.67.0.2:9000")
	f.expect(func(d delta) {
		if s := d.system().Receive; s[UDP].CPU <= 0 || s[UDP].Packets != packets || s[Encapsulated].CPU != 0 {
			d.t.Errorf("the system is charged %+v", s)
		}
		for _, s := range f.states() {
			if s.Tunnel.Packets != 0 || s.Tunnel.Ns != 0 {
				d.t.Errorf("in a tunnel's queue are said to be %d packets of %d ns", s.Tunnel.Packets, s.Tunnel.Ns)
			}
		}
	})
}

// A packet that a host end redirects to the uplink is its container's, sent at once or out of a
// queue.
func TestRedirectedToUplink(t *testing.T) {
	testkit.InFull(t)
	m := exactMeter(t)
	f := newFabric(t, m)
	box, other := f.add("box", 2), f.add("other", 3)
	f.attach(f.host, "h2", hook.Redirect, bypass.Send(m.cfg.Identity.Maps(), f.Index(f.host, "nic0")))
	r := f.receive(f.wire, 1, ":9000")
	for turn, shaped := range []bool{false, true} {
		t.Run(fmt.Sprint("shaped ", shaped), func(t *testing.T) {
			if shaped {
				f.shape(f.host, "nic0", 500e3) // 1.7 ms for a packet
			}
			f.begin(t)
			f.load(box, 0, "udp-send", "--to", "10.66.0.1:9000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets))
			f.got(r, uint64((1+turn)*packets))
			f.expect(func(d delta) {
				d.sent(box, UDP, packets, packets*sizeUDP4)
				d.nothing(other)
				if shaped { // queued packets go out while it does nothing
					d.robs(box)
				}
			})
		})
	}
}
