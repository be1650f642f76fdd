package account

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/sandbox"
)

// While nothing unpacks them, packets that look as a tunnel's do not keep a busy
// CPU from being sampled: anybody can send them. A tunnel's do.
func TestSampledDespiteForged(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.load(box, 1, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000", "--size", "64")
	if share := f.awaitSampled(0, 0.9); share < 0.9 {
		t.Fatalf("without such packets, CPU 0 is sampled %.2f of the time: nothing can be tested", share)
	}
	forged := f.load(f.wire, 1, "udp-send", "--to", "10.66.0.254:4789", "--rate", "500", "--size", "64")
	before := forged.Read()
	if share := f.awaitSampled(0, 0.9); share < 0.9 {
		t.Errorf("CPU 0 is sampled %.2f of the time beside forged packets of a tunnel", share)
	}
	if forged.Read().Since(before).Ops == 0 {
		t.Error("no forged packet was sent: nothing was tested")
	}
}

// What a tunnel's device brings is looked at packet by packet, on a busy CPU too.
func TestExactBehindTunnel(t *testing.T) {
	f := newFabric(t)
	box := f.behindTunnel()
	f.load(box, 1, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.67.0.2:9000", "--rate", "60000", "--size", "64")
	end := time.Now().Add(90 * time.Second)
	for {
		before, err := f.m.Read()
		must(t, err)
		exact := 1 - f.sampled(0)
		after, err := f.m.Read()
		must(t, err)
		got := f.between(before, after).of(box).Receive[Encapsulated].Packets
		if exact > 0.9 && got > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("CPU 0 is exact %.2f of the time, %d packets came by the tunnel", exact, got)
		}
	}
}

// What comes by another NIC takes no part of what a tunnel's packets have cost.
func TestSecondNIC(t *testing.T) {
	f := newFabric(t)
	other := f.bare("other")
	f.lab.wire(sandbox.End{Box: other, Name: "wire", Addr: prefix("10.66.0.9/24")},
		sandbox.End{Box: f.host, Name: "nic1", Bridge: "br0"}, "1")
	box := f.add("box", 2, f.host)
	f.load(box, 0, "udp-recv", "--listen", ":9000")
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.254:4789", "--rate", "3000", "--size", "64")
	f.load(other, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "3000", "--size", "64")
	f.measure(while, func(d delta) {
		d.addsUp()
		a := d.of(box)
		if a.Receive[UDP].Packets == 0 || d.accounts[System].Receive[Encapsulated].CPU == 0 {
			d.t.Errorf("container %+v, system %+v: nothing was tested", a, d.accounts[System])
		}
		if e := a.Receive[Encapsulated]; e != (Work{}) {
			d.t.Errorf("by a plain NIC the container is charged %+v for a tunnel", e)
		}
	})
}

// behindTunnel makes a container in an overlay.
func (f *fabric) behindTunnel() *sandbox.Box {
	f.t.Helper()
	return f.addTo(f.overlay(), "box", 2)
}

// overlay makes one as Docker does (10.67.0.0/24): VXLAN device, bridge and host
// ends in a namespace of their own, the tunnel's packets in the host's. Outside is
// 10.67.0.1.
func (f *fabric) overlay() *sandbox.Box {
	f.t.Helper()
	overlay := f.bare("overlay")
	must(f.t, overlay.Bridge("br0", prefix("10.67.0.254/24")))
	vxlan := func(b *sandbox.Box, remote string) {
		f.ip(b, "link", "add", "vx0", "type", "vxlan", "id", "42", "dstport", "4789", "remote", remote)
	}
	vxlan(f.host, "10.66.0.1")
	f.ip(f.host, "link", "set", "vx0", "netns", fmt.Sprint(overlay.PID))
	f.ip(overlay, "link", "set", "vx0", "master", "br0", "up")
	vxlan(f.wire, "10.66.0.254")
	f.ip(f.wire, "link", "set", "vx0", "up")
	f.ip(f.wire, "addr", "add", "10.67.0.1/24", "dev", "vx0")
	return overlay
}

// addTo adds a container to an overlay, with the address 10.67.0.n.
func (f *fabric) addTo(overlay *sandbox.Box, name string, n int) *sandbox.Box {
	f.t.Helper()
	box := f.add(name, n, overlay)
	f.ip(box, "addr", "add", fmt.Sprintf("10.67.0.%d/24", n), "dev", "eth0")
	return box
}

// sampled is how much of a while a CPU looks at some of its runs only.
func (l *lab) sampled(cpu int) float64 {
	l.t.Helper()
	const looks = 50
	n := 0
	for range looks {
		time.Sleep(10 * time.Millisecond)
		var states []accountCpu
		must(l.t, l.m.maps.FlCpus.Lookup(uint32(0), &states))
		if states[cpu].Weight > 1 {
			n++
		}
	}
	return float64(n) / looks
}

// awaitSampled is sampled once that is as much, or has not become so in 90 s.
func (l *lab) awaitSampled(cpu int, share float64) float64 {
	l.t.Helper()
	end := time.Now().Add(90 * time.Second)
	for {
		if got := l.sampled(cpu); got >= share || time.Now().After(end) {
			return got
		}
	}
}
