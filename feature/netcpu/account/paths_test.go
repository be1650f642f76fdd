package account

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

// fabric is a host with a bridge, an uplink to the wire, and containers.
type fabric struct {
	*lab
	wire, host *sandbox.Box
}

// newFabric makes one whose NIC hands its packets to CPU 0.
func newFabric(t testing.TB) *fabric {
	l := newLab(t)
	f := &fabric{lab: l, wire: l.bare("wire"), host: l.bare("host")}
	l.m.self = l.ns(f.host).Inode()
	must(t, f.host.Bridge("br0", prefix("10.66.0.254/24")))
	l.ip(f.host, "addr", "add", "fd00:66::254/64", "dev", "br0", "nodad")
	l.wire(sandbox.End{Box: f.wire, Name: "wire", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: f.host, Name: "nic0", Bridge: "br0"}, "1")
	f.world(f.wire, "wire")
	return f
}

// polls makes the NIC poll, and for every packet, as real ones do, on the CPU
// to which they come.
func (f *fabric) polls() {
	f.rps(f.host, "nic0", "0")
	nic, wire := f.ns(f.host), f.ns(f.wire)
	must(f.t, wire.Offload(f.device(f.wire, "wire", false).Ifindex, netdev.TSO).Write(netdev.Off))
	must(f.t, nic.Offload(f.device(f.host, "nic0", false).Ifindex, netdev.GRO).Write(netdev.GRO.On()))
}

// add puts a container behind a bridge of the host, or of another namespace.
func (f *fabric) add(name string, last int, at *sandbox.Box) *sandbox.Box {
	f.t.Helper()
	box := f.box(name)
	end := fmt.Sprintf("h%d", last)
	f.lab.wire(sandbox.End{Box: box, Name: "eth0", Addr: prefix(fmt.Sprintf("10.66.0.%d/24", last))},
		sandbox.End{Box: at, Name: end, Bridge: "br0"}, "")
	f.watch(box, f.device(at, end, true), f.device(box, "eth0", false))
	return box
}

// victim is a container that computes on CPU 0.
func (f *fabric) victim() *sandbox.Box {
	v := f.box("victim")
	f.watch(v)
	f.load(v, 0, "burn")
	return v
}

// only checks that a measurement has next to nothing but one container's work.
func (d delta) only(b *sandbox.Box, share float64) {
	d.t.Helper()
	d.addsUp()
	mostly(d.t, "the account of "+b.Name, d.of(b).CPU(), d.here(), share)
	if d.total() < time.Duration(d.seconds*float64(time.Second))/200 {
		d.t.Errorf("only %v of network softirq: nothing was tested", d.total())
	}
}

const while = 700 * time.Millisecond

func TestOneHop(t *testing.T) {
	l := newLab(t)
	wire, box, victim := l.bare("wire"), l.box("box"), l.box("victim")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "1")
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.watch(victim)
	l.load(box, 0, "udp-recv", "--listen", ":9000")
	l.load(victim, 0, "burn")
	l.load(wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "50000")
	l.measure(while, func(d delta) {
		d.only(box, 0.95)
		// Handing a packet on to another CPU is no protocol's.
		received := d.of(box).Receive
		if other := received[Other].Packets; other > received[UDP].Packets/100 {
			d.t.Errorf("%d packets of UDP, %d of nothing that is known", received[UDP].Packets, other)
		}
		if d.stolen(victim, box) < d.total()/20 {
			d.t.Errorf("%v were stolen from the one that computes", d.stolen(victim, box))
		}
	})
}

// Every packet for one container, by NIC and bridge, whatever it is in.
func TestBridge(t *testing.T) {
	for _, c := range []struct {
		name, listen, to string
		protocol         Protocol
		polls            bool
		args             []string
	}{
		{"backlog", ":9000", "10.66.0.2:9000", UDP, false, nil},
		{"polled", ":9000", "10.66.0.2:9000", UDP, true, nil},
		{"ipv6", "[::]:9000", "[fd00:66::2]:9000", UDP, false, nil},
		{"fragments", ":9000", "10.66.0.2:9000", UDP, false, []string{"--size", "4000"}},
		{"ipv6 fragments", "[::]:9000", "[fd00:66::2]:9000", UDP, false, []string{"--size", "4000"}},
		{"tcp", ":9000", "10.66.0.2:9000", TCP, false, []string{"--size", "4000"}},
		{"tcp polled", ":9000", "10.66.0.2:9000", TCP, true, []string{"--size", "4000"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t)
			box := f.add("box", 2, f.host)
			f.victim()
			kind := "udp"
			args := append([]string{"--rate", "20000"}, c.args...)
			if c.protocol == TCP {
				kind = "tcp"
			}
			if c.polls {
				f.polls()
			}
			f.load(box, 0, kind+"-recv", "--listen", c.listen)
			f.load(f.wire, 1, append([]string{kind + "-send", "--to", c.to}, args...)...)
			f.measure(while, func(d delta) {
				d.only(box, 0.9)
				mostly(d.t, "its protocol", d.of(box).Receive[c.protocol].CPU+d.of(box).Send[c.protocol].CPU, d.of(box).CPU(), 0.6)
			})
		})
	}
}

// From one container to another: the receiver is charged for its part, and
// takes it from the sender.
func TestSameHost(t *testing.T) {
	f := newFabric(t)
	from, to := f.add("from", 2, f.host), f.add("to", 3, f.host)
	f.load(to, 0, "udp-recv", "--listen", ":9000")
	f.load(from, 1, "udp-send", "--to", "10.66.0.3:9000", "--rate", "20000")
	f.measure(while, func(d delta) {
		d.addsUp()
		mostly(d.t, "both accounts", d.of(from).CPU()+d.of(to).CPU(), d.total(), 0.95)
		mostly(d.t, "the receiver", d.of(to).Receive[UDP].CPU, d.total(), 0.4)
		// How much less the sender's part is depends on what it costs here to wake
		// the receiver on another CPU: its packets are counted, and are not free.
		sent, received := d.of(from).Send[UDP], d.of(to).Receive[UDP]
		if sent.Packets < received.Packets*9/10 || sent.CPU < time.Duration(sent.Packets)*100 {
			d.t.Errorf("the sender: %d packets in %v, the receiver: %d", sent.Packets, sent.CPU, received.Packets)
		}
		mostly(d.t, "stolen from the sender", d.stolen(from, to), d.of(to).CPU(), 0.9)
		mostly(d.t, "the sender's own time", d.of(from).Own, d.of(from).CPU(), 0.9)
	})
}

func TestLoopback(t *testing.T) {
	l := newLab(t)
	wire, box := l.bare("wire"), l.box("box")
	l.wire(sandbox.End{Box: wire, Name: "h0", Addr: prefix("10.66.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: prefix("10.66.0.2/24")}, "")
	l.watch(box, l.device(wire, "h0", true), l.device(box, "eth0", false))
	l.load(box, 0, "udp-recv", "--listen", ":9000")
	l.load(box, 1, "udp-send", "--to", "127.0.0.1:9000", "--rate", "20000")
	l.measure(while, func(d delta) {
		d.only(box, 0.98)
		mostly(d.t, "its own time", d.of(box).Own, d.of(box).CPU(), 0.9)
	})
}

func TestOverlay(t *testing.T) {
	for _, proto := range []Protocol{UDP, TCP} {
		t.Run(proto.String(), func(t *testing.T) {
			f := newFabric(t)
			box := f.behindTunnel()
			f.victim()
			name := proto.String()
			f.load(box, 0, name+"-recv", "--listen", ":9000")
			f.load(f.wire, 1, name+"-send", "--to", "10.67.0.2:9000", "--rate", "20000", "--size", "1300")
			f.measure(while, func(d delta) {
				d.only(box, 0.85)
				e := d.of(box).Receive[Encapsulated]
				if e.CPU < d.total()/20 || e.Packets == 0 {
					d.t.Errorf("encapsulated %+v of %v", e, d.total())
				}
			})
		})
	}
}

func TestMacvlan(t *testing.T) {
	for _, proto := range []Protocol{UDP, TCP} {
		t.Run(proto.String(), func(t *testing.T) {
			l := newLab(t)
			wire, host, box := l.bare("wire"), l.bare("host"), l.box("box")
			l.wire(sandbox.End{Box: wire, Name: "wire", Addr: prefix("10.66.0.1/24")}, sandbox.End{Box: host, Name: "nic0"}, "1")
			l.world(wire, "wire")
			l.ip(host, "link", "add", "mv0", "link", "nic0", "netns", fmt.Sprint(box.PID), "type", "macvlan", "mode", "bridge")
			l.ip(box, "link", "set", "mv0", "up")
			l.ip(box, "addr", "add", "10.66.0.2/24", "dev", "mv0")
			l.watch(box, l.device(box, "mv0", false))
			name := proto.String()
			l.load(box, 0, name+"-recv", "--listen", ":9000")
			l.load(wire, 1, name+"-send", "--to", "10.66.0.2:9000", "--rate", "20000")
			l.measure(while, func(d delta) { d.only(box, 0.85) })
		})
	}
}

func TestHostMode(t *testing.T) {
	for _, proto := range []Protocol{UDP, TCP} {
		t.Run(proto.String(), func(t *testing.T) {
			l := newLab(t)
			wire, host := l.bare("wire"), l.bare("host")
			l.wire(sandbox.End{Box: wire, Name: "wire", Addr: prefix("10.66.0.1/24")},
				sandbox.End{Box: host, Name: "nic0", Addr: prefix("10.66.0.2/24")}, "1")
			l.world(wire, "wire")
			box, other := l.boxIn("box", host), l.boxIn("other", host)
			for _, b := range []*sandbox.Box{box, other} {
				must(t, l.m.Watch(Tenant{ID: l.ids[b], Cgroups: []uint64{uint64(l.ids[b])}, HostNetwork: true}))
			}
			name := proto.String()
			l.load(box, 0, name+"-recv", "--listen", ":9000")
			l.load(other, 0, name+"-recv", "--listen", ":9001")
			l.load(wire, 1, name+"-send", "--to", "10.66.0.2:9000", "--rate", "20000")
			l.measure(while, func(d delta) {
				d.only(box, 0.85)
				if cpu := d.of(other).CPU(); cpu > d.total()/50 {
					d.t.Errorf("the other one is charged %v", cpu)
				}
			})
		})
	}
}

// A published port, and a container that speaks first: routed and translated by
// the host, there and back.
func TestNAT(t *testing.T) {
	for _, c := range []struct {
		name, proto string
		polls, out  bool
		v6          bool
	}{
		{name: "udp", proto: "udp"},
		{name: "udp polled", proto: "udp", polls: true},
		{name: "tcp", proto: "tcp"},
		{name: "tcp polled", proto: "tcp", polls: true},
		{name: "udp ipv6", proto: "udp", v6: true},
		{name: "udp masqueraded", proto: "udp", out: true},
		{name: "tcp masqueraded", proto: "tcp", out: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t)
			if c.polls {
				f.polls()
			}
			f.ip(f.host, "link", "set", "nic0", "nomaster")
			f.ip(f.wire, "addr", "flush", "dev", "wire")
			family, inside, outside, nic, gateway := "ip", "10.66.0.2", "10.65.0.1", "10.65.0.2", "10.66.0.254"
			length := "/24"
			if c.v6 {
				family, inside, outside, nic, gateway = "ip6", "[fd00:66::2]", "fd00:65::1", "[fd00:65::2]", "fd00:66::254"
				length = "/64"
			}
			f.ip(f.host, "addr", "add", strings.Trim(nic, "[]")+length, "dev", "nic0", "nodad")
			f.ip(f.wire, "addr", "add", outside+length, "dev", "wire", "nodad")
			must(t, f.host.Sysctl("ipv4/ip_forward", "1"))
			must(t, f.host.Sysctl("ipv6/conf/all/forwarding", "1"))
			for _, rule := range []string{
				"add table " + family + " nat",
				"add chain " + family + " nat pre { type nat hook prerouting priority -100 ; }",
				"add chain " + family + " nat post { type nat hook postrouting priority 100 ; }",
				fmt.Sprintf("add rule %s nat pre iifname nic0 %s dport 8000 dnat to %s:9000", family, c.proto, inside),
				"add rule " + family + " nat post oifname nic0 masquerade",
			} {
				f.run(f.host, "nft", rule)
			}
			box := f.add("box", 2, f.host)
			f.ip(box, "route", "add", "default", "via", gateway)
			f.victim()
			server, client, to := box, f.wire, nic+":8000"
			if c.out { // outside has no way back to the container but by the translation
				server, client, to = f.wire, box, outside+":9000"
			}
			on := map[*sandbox.Box]int{box: 0, f.wire: 1}
			f.load(server, on[server], "rr-server", "--proto", c.proto, "--listen", ":9000")
			f.load(client, on[client], "rr-client", "--proto", c.proto, "--to", to, "--conns", "16", "--size", "100")
			protocol := UDP
			if c.proto == "tcp" {
				protocol = TCP
			}
			f.measure(while, func(d delta) {
				d.only(box, 0.95)
				if d.of(box).Send[protocol].CPU == 0 || d.of(box).Receive[protocol].CPU == 0 {
					d.t.Error("nothing for one of the directions")
				}
			})
		})
	}
}

// Threads in place of softirqs, as mode isolate makes them.
func TestThreads(t *testing.T) {
	f := newFabric(t)
	f.polls()
	box := f.add("box", 2, f.host)
	inside, host := f.ns(box), f.ns(f.host)
	eth0, nic0 := f.device(box, "eth0", false).Ifindex, f.device(f.host, "nic0", false).Ifindex
	h2 := f.device(f.host, "h2", false).Ifindex
	must(t, host.Offload(h2, netdev.TSO).Write(netdev.Off))
	must(t, inside.Offload(eth0, netdev.GRO).Write(netdev.GRO.On()))
	must(t, inside.Threaded(eth0).Write("1"))
	must(t, host.Threaded(nic0).Write("1"))
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "20000")
	f.measure(while, func(d delta) {
		d.only(box, 0.9)
		mostly(d.t, "the threads' part", d.thread, d.total(), 0.6)
		mostly(d.t, "its own thread", d.of(box).Own, d.thread, 0.2)
		uplink := Theft{Victim: Party{Kind: NAPI}, Culprit: f.ids[box]}
		mostly(d.t, "the uplink's thread", d.thefts[uplink], d.thread, 0.2)
	})
}
