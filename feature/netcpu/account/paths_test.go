package account

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// The size of a datagram of payload bytes, with the headers of UDP and IP.
const (
	sizeUDP4 = payload + 8 + 20
	sizeUDP6 = payload + 8 + 40
)

func TestOneHop(t *testing.T) {
	testkit.InFull(t)
	l := newLab(t, exactMeter(t))
	wire, box, victim, other := l.bare("wire"), l.box("box"), l.box("victim"), l.box("other")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.watch(victim)
	l.watch(other)
	r := l.receive(box, 0, ":9000")
	l.load(victim, 0, "burn")
	l.send(wire, 1, packets, "udp-send", "10.66.0.2:9000")
	l.got(r, packets)
	l.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		// The hand-over of a packet to another CPU has no protocol and counts no packet.
		if n := d.of(box).Receive[Other].Packets; n != 0 {
			d.t.Errorf("%d packets of nothing that is known", n)
		}
		d.robs(box)
		d.nothing(victim, other)
	})
	t.Run("loopback", func(t *testing.T) {
		l.begin(t)
		l.send(box, 1, packets, "udp-send", "127.0.0.1:9000")
		l.got(r, 2*packets)
		l.expect(func(d delta) {
			d.received(box, UDP, packets, packets*sizeUDP4)
			if d.of(box).Own <= 0 {
				d.t.Error("nothing of it in its own time")
			}
			d.nothing(victim, other)
		})
	})
}

// stream is the size of a stream of TCP, with packets that may be merged.
const (
	writes = 8
	stream = writes << 17 // the size of a write in load's tcp-send
)

// Packets for one container, by NIC and bridge: datagrams of each kind, by the number of their
// packets and of bytes with headers, and streams.
func TestBridge(t *testing.T) {
	testkit.OnKernels(t)
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	victim := f.victim()
	for i, c := range testkit.Cases(t, 2, []struct {
		name           string
		proto          Protocol
		v6, polls      bool
		size           int
		packets, bytes uint64
	}{
		{"udp", UDP, false, false, payload, 1, sizeUDP4},
		{"tcp", TCP, false, false, 0, 0, 0},
		{"udp polled", UDP, false, true, payload, 1, sizeUDP4},
		{"tcp polled", TCP, false, true, 0, 0, 0},
		{"fragments", UDP, false, true, 4000, 3, 4000 + 8 + 3*20},
		{"ipv6", UDP, true, true, payload, 1, sizeUDP6},
		{"ipv6 fragments", UDP, true, true, 4000, 3, 4000 + 8 + 3*48},
	}...) {
		t.Run(c.name, func(t *testing.T) {
			f.t = t
			// The host's work for a packet, up to the veth, is on one CPU, and the container's on the
			// other.
			nic, inside := 0, "2"
			if c.polls {
				f.polls()
				nic, inside = 1, "1"
			}
			f.rps(box, "eth0", inside)
			listen, to := fmt.Sprint(":", 9000+i), fmt.Sprint("10.66.0.2:", 9000+i)
			if c.v6 {
				if !f.v6 {
					f.sixth(box, 2)
				}
				listen, to = fmt.Sprint("[::]:", 9000+i), fmt.Sprintf("[fd00:66::2]:%d", 9000+i)
			}
			f.begin(t)
			was := f.between(f.began, f.began).on(box, nic).By[c.proto].Ns
			if c.proto == TCP {
				r := f.load(box, 0, "tcp-recv", "--listen", listen)
				f.send(f.wire, 1, writes, "tcp-send", to)
				f.gotBytes(r, stream)
			} else {
				r := f.receive(box, 0, listen)
				// The sender of fragments needs no free buffer: some kernels free fragments late.
				f.send(f.wire, 1, packets, "udp-send", to, "--size", fmt.Sprint(c.size), "--buffer", "33554432")
				f.got(r, packets)
			}
			f.expect(func(d delta) {
				a := d.of(box)
				if c.proto == TCP {
					d.streamed(a.Receive[TCP], a.Send[TCP], stream)
				} else {
					d.received(box, UDP, packets*c.packets, packets*c.bytes)
				}
				if (c.proto == TCP && a.Receive[UDP] != Work{}) || a.Send[UDP] != (Work{}) {
					d.t.Errorf("for UDP it is charged %+v, %+v", a.Receive[UDP], a.Send[UDP])
				}
				if d.on(box, nic).By[c.proto].Ns == was {
					d.t.Error("nothing for what the host does up to the veth")
				}
				d.robs(box)
				if !c.v6 { // IPv6 neighbour discovery is multicast
					d.nothing(other, victim)
				}
			})
		})
	}
}

// Two containers behind one tunnel: each pays for its packets, and for the packets that carried
// them.
func TestOverlay(t *testing.T) {
	testkit.OnKernels(t)
	f := newFabric(t, exactMeter(t))
	overlay := f.overlay()
	boxes := []*sandbox.Box{f.inOverlay(overlay, "a", 2), f.inOverlay(overlay, "b", 3)}
	victim := f.victim()
	// Containers get packets one after the other, and fewer than the pool holds before the first
	// packet leaves the tunnel (64): a busy CPU receives all of them before that.
	const most = 50
	for i, box := range boxes {
		r := f.receive(box, 0, ":9000")
		f.send(f.wire, 1, most/(1+i), "udp-send", fmt.Sprintf("10.67.0.%d:9000", 2+i))
		f.got(r, uint64(most/(1+i)))
	}
	f.expect(func(d delta) {
		for i, box := range boxes {
			n := uint64(most / (1 + i))
			d.received(box, UDP, n, n*sizeUDP4)
			// The tunnel also carries ARP.
			if e := d.of(box).Receive[Encapsulated]; e.Packets < n || e.CPU <= 0 {
				d.t.Errorf("%s is charged %+v for the tunnel's work with %d packets", box.Name, e, n)
			}
			d.robs(box)
		}
		d.nothing(victim)
	})
}

func TestOverlayTCP(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box := f.inOverlay(f.overlay(), "box", 2)
	r := f.load(box, 0, "tcp-recv", "--listen", ":9000")
	f.send(f.wire, 1, writes, "tcp-send", "10.67.0.2:9000")
	f.gotBytes(r, stream)
	f.expect(func(d delta) {
		a := d.of(box)
		d.streamed(a.Receive[TCP], a.Send[TCP], stream)
		if e := a.Receive[Encapsulated]; e.Packets == 0 || e.CPU <= 0 {
			d.t.Errorf("for the tunnel's work it is charged %+v", e)
		}
	})
}

// either sends datagrams, and a stream, from outside to 10.66.0.2, and checks that the box with that
// address is charged for them and others are not.
func (l *lab) either(t *testing.T, wire, box *sandbox.Box, others ...*sandbox.Box) {
	for _, p := range []Protocol{UDP, TCP} {
		t.Run(p.String(), func(t *testing.T) {
			l.begin(t)
			if p == TCP {
				r := l.load(box, 0, "tcp-recv", "--listen", ":9000")
				l.send(wire, 1, writes, "tcp-send", "10.66.0.2:9000")
				l.gotBytes(r, stream)
			} else {
				l.datagrams(wire, box, 0, "10.66.0.2:9000")
			}
			l.expect(func(d delta) {
				d.nothing(others...)
				w := d.of(box).Receive[p]
				if p == UDP {
					d.counted(box.Name, w, packets, packets*sizeUDP4)
				} else if w.Bytes < stream || w.CPU <= 0 {
					d.t.Errorf("%+v for %d bytes of TCP", w, stream)
				}
			})
		})
	}
}

func TestMacvlan(t *testing.T) {
	testkit.InFull(t)
	l := newLab(t, exactMeter(t))
	wire, host, box, other := l.bare("wire"), l.bare("host"), l.box("box"), l.box("other")
	l.wire(sandbox.End{Box: wire, Name: "wire", Addr: prefix("10.66.0.1/24")}, sandbox.End{Box: host, Name: "nic0"}, "1")
	l.world(wire, "wire")
	for i, b := range []*sandbox.Box{box, other} {
		mv := l.Macvlan(host, sandbox.End{Box: b, Name: fmt.Sprint("mv", i)})
		l.watch(b, l.device(b, mv.Name, false))
	}
	l.Address(box, "mv0", "10.66.0.2/24")
	l.either(t, wire, box)
}

func TestHostMode(t *testing.T) {
	testkit.InFull(t)
	l := newLab(t, exactMeter(t))
	wire, host := l.bare("wire"), l.bare("host")
	l.wire(sandbox.End{Box: wire, Name: "wire", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: host, Name: "nic0", Addr: prefix("10.66.0.2/24")}, "1")
	l.world(wire, "wire")
	box, other := l.boxIn("box", host), l.boxIn("other", host)
	for _, b := range []*sandbox.Box{box, other} {
		must(t, l.m.Watch(identity.Member{ID: l.ids[b], Cgroups: []uint64{uint64(l.ids[b])}, HostNetwork: true}))
	}
	l.load(other, 0, "udp-recv", "--listen", ":9001")
	l.either(t, wire, box, other)
}

// NAPI threads replace softirqs, as in the mode isolate.
func TestThreads(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	f.polls()
	box, other := f.add("box", 2), f.add("other", 3)
	inside, host := f.Open(box), f.Open(f.host)
	eth0, nic0 := f.device(box, "eth0", false).Ifindex, f.device(f.host, "nic0", false).Ifindex
	h2 := f.device(f.host, "h2", false).Ifindex
	must(t, host.Offload(h2, netdev.TSO).Write(netdev.Off))
	must(t, inside.Offload(eth0, netdev.GRO).Write(netdev.GRO.On()))
	must(t, inside.Threaded(eth0).Write("1"))
	must(t, host.Threaded(nic0).Write("1"))
	f.datagrams(f.wire, box, 0, "10.66.0.2:9000")
	f.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		uplink := d.thefts[Pair{Party{Kind: NAPI}, f.ids[box]}]
		if d.thread <= 0 || d.of(box).Own <= 0 || uplink <= 0 {
			d.t.Errorf("threads ran for %v, its own for %v, the uplink's for %v of it", d.thread, d.of(box).Own, uplink)
		}
		d.nothing(other)
	})
}

// Each CPU's NAPI thread replaces softirqs for packets without a NAPI of their own.
//
//	make vm VM_BOOT=thread_backlog_napi VM_KERNELS="6.12 newest" VM_PACKAGES=feature/netcpu/account VM_RUN=TestBacklogThreads
func TestBacklogThreads(t *testing.T) {
	parameters, err := os.ReadFile("/proc/cmdline")
	must(t, err)
	if !strings.Contains(string(parameters), "thread_backlog_napi") {
		testkit.Skip(t, "the kernel was booted without thread_backlog_napi")
	}
	f := newFabric(t, exactMeter(t))
	box, other := f.add("box", 2), f.add("other", 3)
	f.datagrams(f.wire, box, 0, "10.66.0.2:9000")
	f.expect(func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		if d.thread <= d.softirq {
			d.t.Errorf("threads ran for %v, softirqs for %v", d.thread, d.softirq)
		}
		d.nothing(other)
	})
}

// A full table of thefts is counted, and the accounts stay exact: so do the sums that each
// container took and lost.
func TestLost(t *testing.T) {
	testkit.InFull(t)
	l := newLab(t, exactMeter(t))
	wire, box, victim := l.bare("wire"), l.box("box"), l.box("victim")
	l.watch(victim)
	l.load(victim, 0, "burn")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	one := make([]uint64, ebpf.MustPossibleCPU())
	for i := range l.m.maps.FlThefts.MaxEntries() {
		key := accountTheft{Victim: 0xffff, Kind: uint16(i), Culprit: uint16(i >> 4)}
		if err := l.m.maps.FlThefts.Put(key, one); err != nil {
			break // full
		}
	}
	// Only now: pairs from before have their places.
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.datagrams(wire, box, 0, "10.66.0.2:9000")
	l.expectAny(delta.sums, func(d delta) {
		d.received(box, UDP, packets, packets*sizeUDP4)
		took, robbed := d.of(box).Took, d.of(victim).Robbed
		if d.readingLost == 0 || took <= 0 || robbed <= 0 || d.stolen(victim, box) != 0 {
			d.t.Errorf("%d charges lost, the box took %v, the victim lost %v", d.readingLost, took, robbed)
		}
		d.nothing(victim)
	})
}

// From one container to another, or from the host: the receiver pays for its part. A packet that is
// received in the time of its sender's task, such as a request that crosses no NIC, robs no
// container: the meter distinguishes the sender from a task that only was on the CPU.
func TestPeers(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	client, server, other := f.add("client", 2), f.add("server", 3), f.add("other", 4)
	r := f.receive(server, 0, ":9000")
	for i, sender := range []*sandbox.Box{client, f.host} {
		t.Run("from "+sender.Name, func(t *testing.T) {
			f.begin(t)
			f.send(sender, 1, packets, "udp-send", "10.66.0.3:9000")
			f.got(r, uint64(packets*(1+i)))
			f.expect(func(d delta) {
				d.received(server, UDP, packets, packets*sizeUDP4)
				if w := d.of(server).Send[UDP]; w != (Work{}) {
					d.t.Errorf("for sending the receiver is charged %+v", w)
				}
				d.robs(server)
				d.spares(server, f.ids[sender]) // of the host: 0
				d.nothing(other)
				if sender == f.host {
					return
				}
				d.sent(client, UDP, packets, packets*sizeUDP4)
				if a := d.of(client); a.Own <= 0 || a.Receive[UDP] != (Work{}) {
					d.t.Errorf("in its own time the sender has %v; for receiving it is charged %+v", a.Own, a.Receive[UDP])
				}
			})
		})
	}
}

// spares checks that most of the sender's time that packets take counts as Peer, not as theft.
func (d delta) spares(culprit *sandbox.Box, sender container.ID) {
	d.t.Helper()
	peer, task := d.stole(culprit, Party{sender, Peer}), d.stole(culprit, Party{sender, Task})
	// Late interrupts of the sender, by a timer for example, are in a task's time.
	if peer == 0 || task > peer/4 {
		d.t.Errorf("of the sender's time %v are said to be its own doing, and %v stolen", peer, task)
	}
}

// The same holds in windows, in which packets carry no stamps.
func TestPeersWithoutStamps(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	client, server := f.add("client", 2), f.add("server", 3)
	r := f.receive(server, 0, ":9000")
	must(t, m.turn(full))
	f.begin(t)
	f.send(client, 1, packets, "udp-send", "10.66.0.3:9000")
	f.got(r, packets)
	f.expect(func(d delta) { d.spares(server, f.ids[client]) })
	if m.stamping {
		t.Error("packets are stamped")
	}
	must(t, m.turn(bare))
}

// stole returns a victim's time that a box's packets took.
func (d delta) stole(culprit *sandbox.Box, v Party) time.Duration {
	return d.thefts[Pair{v, d.l.ids[culprit]}]
}
