package account

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
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

// TestStampOfAnother has a wire that keeps the stamp of another agent on the same kernel, as a veth
// between two nodes of kind does: a packet's owner is who receives it, behind a tunnel too.
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
