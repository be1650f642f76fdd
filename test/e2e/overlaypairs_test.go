package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// far is the outside's address on the overlay network: another node, without an agent.
const far = "10.66.0.1"

// newOverlayRig is a rig whose containers reach the wire by an overlay network: the bridge has no
// port nic0, but the VXLAN device, which sends by nic0.
func newOverlayRig(t *testing.T) *rig {
	t.Helper()
	h := topology.New(t)
	r := &rig{Host: h, t: t}
	r.host, r.wire = h.Uplink("e2e-", "10.99.0.1/24", sandbox.End{Addr: netip.MustParsePrefix("10.99.0.2/24"), Queues: 2})
	must(t, r.host.Bridge("br0", netip.Prefix{}))
	h.Tunnel(r.host, "", "10.99.0.1", sandbox.End{Box: r.host, Bridge: "br0"})
	h.Tunnel(r.wire, "", "10.99.0.2", sandbox.End{Box: r.wire, Addr: netip.MustParsePrefix(far + "/16")})
	must(t, h.Open(r.host).Offload(h.Index(r.host, "nic0"), netdev.GRO).Write(netdev.GRO.On()))
	var err error
	r.inode, err = netdev.InodeOf("/proc", r.host.PID)
	must(t, err)
	return r
}

// pair is one container on an overlay network and the agent of its host.
type pair struct {
	*rig
	*agent
	box    *sandbox.Box
	before state
	rate   string // requests a second of fast
}

const paired = "e2e-overlay"

func newPair(t *testing.T) *pair {
	t.Helper()
	r := newOverlayRig(t)
	p := &pair{rig: r, box: r.add(sandbox.Spec{Name: paired}), rate: "flood"}
	p.before = r.state()
	p.agent = newAgent(t, r.host, "--sandbox-dir", r.Sandboxes.Dir(), "--uplink", "nic0=1gbit")
	generate(t, r.wire, 1, "rr-server")
	return p
}

// set writes these settings of the container to a policy file.
func (p *pair) set(settings string) {
	p.rig.t.Helper()
	p.policy("pair.yaml", "match: {name: "+paired+"}\nset: {"+settings+"}\n")
}

// ways waits until packets take these ways, for these reasons.
func (p *pair) ways(egress, whyEgress, ingress, whyIngress string) {
	p.rig.t.Helper()
	want := [...]string{egress, whyEgress, ingress, whyIngress}
	await(p.rig.t, fmt.Sprintf("the ways %q", want), func() error {
		e, err := p.overlayEnd(paired)
		if err == nil && want != [...]string{e.Egress.Way, e.Egress.Reason, e.Ingress.Way, e.Ingress.Reason} {
			err = fmt.Errorf("they are %+v", e)
		}
		return err
	})
}

// fast makes the container send requests to the other node, until so many packets have taken the
// fast path in each fast direction. It returns the counts since then, at rest.
func (p *pair) fast(out, in uint64) (e api.OverlayEnd) {
	t := p.rig.t
	t.Helper()
	before, err := p.overlayEnd(paired)
	must(t, err)
	end := generate(t, p.box, 0, "rr-client", "--to", far+":9000", "--size", "64", "--rate", p.rate)
	await(t, "fast packets", func() error {
		if e, err = p.overlayEnd(paired); err != nil {
			return err
		}
		if e.Egress.Fast < before.Egress.Fast+out || e.Ingress.Fast < before.Ingress.Fast+in {
			return fmt.Errorf("there are %+v", e)
		}
		return nil
	})
	end()
	e, err = p.overlayEnd(paired)
	must(t, err)
	e.Egress.Fast -= before.Egress.Fast
	e.Egress.Slow -= before.Egress.Slow
	e.Ingress.Fast -= before.Ingress.Fast
	e.Ingress.Slow -= before.Ingress.Slow
	if out == 0 && e.Egress.Fast > 0 || in == 0 && e.Ingress.Fast > 0 {
		t.Errorf("fast where it must not be: %+v", e)
	}
	return e
}

// class waits for the container's class at a device, and returns how many packets it has sent.
func (p *pair) class(device, direction string) (packets uint64) {
	t := p.rig.t
	t.Helper()
	await(t, "a class at "+device, func() error {
		tr, err := p.agent.api.Traffic(t.Context(), paired, 0)
		if err != nil {
			return err
		}
		for _, c := range tr.Classes {
			if c.Uplink == device && c.Direction == direction && c.Name == paired {
				packets = c.Packets
				return nil
			}
		}
		return fmt.Errorf("there are %+v", tr.Classes)
	})
	return packets
}

// beside adds a feature to overlay and then removes overlay first, or the other one; in the tier
// full it does both. alone checks the state with overlay only, together the state with both.
func (p *pair) beside(other string, overlayFirst bool, alone, together func()) {
	t := p.rig.t
	t.Helper()
	const on = "overlay: on"
	both := on + ", " + other
	orders := [][]string{{on, both, other}, {other, both, on}}
	if !overlayFirst {
		slices.Reverse(orders)
	}
	for _, order := range orders[:testkit.Scale(t, 1, 2)] {
		p.set(order[0])
		p.start()
		for _, settings := range order {
			p.set(settings)
			switch settings {
			case on:
				alone()
			case both:
				together()
			}
		}
		p.stop()
		p.sameAs(p.before, fmt.Sprintf("after %q", order))
	}
}

// TestOverlayTraffic checks that the class of a container at the uplink counts its fast packets
// too, whatever else is in force.
func TestOverlayTraffic(t *testing.T) {
	p := newPair(t)
	inClass := func(in uint64) {
		t.Helper()
		before := p.class("nic0", "egress")
		e := p.fast(200, in)
		if n := p.class("nic0", "egress") - before; n < e.Egress.Fast {
			t.Errorf("the class has sent %d packets, of %d fast ones", n, e.Egress.Fast)
		}
	}
	p.beside("net.rate: 100mbit", true, func() { p.ways("fast", "", "peer", "") }, func() {
		p.stands(paired, "traffic", api.StateDone)
		p.ways("fast", "", "peer", "")
		inClass(200)
	})
	p.beside("net.rate: 100mbit, net.ingress.ceil: 100mbit", false, func() { p.ways("fast", "", "peer", "") }, func() {
		p.stands(paired, "traffic", api.StateDone)
		p.ways("fast", "", "end", "shaped")
		before := p.class("h1", "ingress")
		e := p.fast(200, 200)
		if n := p.class("h1", "ingress") - before; n < e.Ingress.Fast {
			t.Errorf("the class at the host end has sent %d packets, of %d fast ones", n, e.Ingress.Fast)
		}
	})
	p.beside("net.ceil: 100mbit", true, func() { p.ways("fast", "", "peer", ""); p.stands(paired, "overlay", api.StateDone) }, func() {
		p.stands(paired, "traffic", api.StateDone)
		const why = "its net.ceil leads what it sends through a queue of its own"
		p.ways("slow", "shaped", "peer", "")
		p.stands(paired, "overlay", api.StatePartly, why)
		mustSay(t, p.run("explain", paired), 0, why)
		mustSay(t, p.run("overlay", paired), 0, "its net.ceil leads what it sends")
		p.fast(0, 200)
	})
}

// TestOverlayNetCPU checks that the accounts charge the receiver for its fast packets, and that its
// own thread polls them.
func TestOverlayNetCPU(t *testing.T) {
	p := newPair(t)
	received := func(a api.NetCPUAccount) (n uint64) {
		for _, w := range a.Work {
			if w.Direction == "receive" && w.Protocol == api.LatencyUDP {
				n += w.Packets
			}
		}
		return n
	}
	// charged checks that the account counts the fast packets, and returns the seconds in threads.
	charged := func() (thread float64) {
		t.Helper()
		before, err := p.agent.api.NetCPU(t.Context(), paired)
		must(t, err)
		e := p.fast(200, 200)
		now, err := p.agent.api.NetCPU(t.Context(), paired)
		must(t, err)
		was := uint64(0)
		if len(before.Accounts) > 0 {
			was = received(before.Accounts[0])
		}
		// Most of them, because a reading may be a little late.
		if n := received(now.Accounts[0]) - was; n < e.Ingress.Fast/2 {
			t.Errorf("the account has %d packets more, of %d fast ones: %+v", n, e.Ingress.Fast, now)
		}
		if n := received(now.System) - received(before.System); n > 0 {
			t.Errorf("the system pays for %d packets of a container", n)
		}
		return now.Thread - before.Thread
	}
	p.beside("netcpu: isolate, netcpu.steal: 0%", false, func() {
		p.ways("fast", "", "peer", "")
		charged()
	}, func() {
		p.stands(paired, "netcpu", api.StateDone)
		p.ways("fast", "", "end", "thread")
		if charged() == 0 {
			t.Error("no thread has polled a packet")
		}
	})
}

// TestOverlayLatency checks that the packets of both directions are measured on either path.
func TestOverlayLatency(t *testing.T) {
	p := newPair(t)
	p.rate = "1000" // each packet is measured: in a flood some are, which may be fewer than the slow ones
	p.beside("latency: on", false, func() { p.ways("fast", "", "peer", "") }, func() {
		p.stands(paired, "latency", api.StateDone)
		p.ways("fast", "", "end", "watched")
		read := func() map[string]api.LatencyCoverage {
			l, err := p.agent.api.Latency(t.Context(), paired, 0)
			must(t, err)
			of := make(map[string]api.LatencyCoverage)
			for _, c := range l.Containers {
				of[c.Direction] = c.Coverage
			}
			return of
		}
		before := read()
		var slow [2]uint64
		await(t, "more measured packets than slow ones", func() error {
			e := p.fast(200, 200)
			slow[0] += e.Egress.Slow
			slow[1] += e.Ingress.Slow
			for i, direction := range []string{"egress", "ingress"} {
				b, n := before[direction], read()[direction]
				t.Logf("%s: %+v", direction, n)
				if n.Matched-b.Matched <= slow[i] {
					return fmt.Errorf("%s: %d slow ones, and measured are %+v, before %+v", direction, slow[i], n, b)
				}
			}
			return nil
		})
	})
}
