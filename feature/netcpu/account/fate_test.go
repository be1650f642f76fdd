package account

import (
	"fmt"
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/bypass"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// newTunnelled makes a host with a VXLAN as Flannel builds it: 10.67.0.0/24, with bridge and host
// ends in the host's namespace. Outside is 10.67.0.1.
func newTunnelled(t testing.TB, m *Meter) *fabric {
	t.Helper()
	l := newLab(t, m)
	f := &fabric{lab: l, wire: l.bare("wire"), host: l.bare("host"), ends: make(map[*sandbox.Box]netip.Addr)}
	_, err := m.cfg.Identity.Tell("fabric", identity.Member{ID: 1, Devices: []identity.Device{
		{Netns: l.Open(f.host).Inode(), Ifindex: math.MaxInt32, HostEnd: true, Trusted: true},
	}})
	must(t, err)
	l.wire(sandbox.End{Box: f.wire, Name: "wire", Addr: prefix("10.66.0.1/24")},
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
	r := f.receive(box, 1, ":9000")
	f.send(f.wire, 1, packets, "udp-send", "10.67.0.2:9000")
	f.got(r, packets)
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
