package overlay

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// A packet of a container that differs from those on the slow path takes the slow path.
func TestSentAttacks(t *testing.T) {
	b := newBench(t)
	at := func(n int, v ...byte) func(shape, []byte) []byte {
		return func(s shape, p []byte) []byte {
			copy(p[n:], v)
			sumInner(p[14:], s.inner6)
			return p
		}
	}
	l4 := func(n int, v ...byte) func(shape, []byte) []byte {
		return func(s shape, p []byte) []byte { return at(14+ipLen(s.inner6)+n, v...)(s, p) }
	}
	b.attacks([]attack{
		{"with another's MAC", at(11, 9), header, every},
		{"to another MAC", at(5, 9), header, every},
		{"broadcast", at(0, 255, 255, 255, 255, 255, 255), header, every},
		{"VLAN tag", func(_ shape, p []byte) []byte { return tag(p, 5) }, protocol, every},
		{"with another's address", at(14+15, 9), unknownFlow, inner(false)},
		{"with another's address", at(14+23, 9), unknownFlow, inner(true)},
		{"to another", at(14+19, 9), unknownFlow, inner(false)},
		{"from another port", l4(1, 9), unknownFlow, every},
		{"TTL 1", at(14+8, 1), ttl, func(s shape) bool { return !s.inner6 && !s.bridged }},
		{"hop limit 0", at(14+7, 0), ttl, func(s shape) bool { return s.inner6 && !s.bridged }},
		{"options", at(14, 0x46), options, inner(false)},
		{"fragment", at(14+6, 0x20), fragment, inner(false)},
		{"header checksum", func(_ shape, p []byte) []byte { p[24] ^= 1; return p }, checksum, inner(false)},
		{"bytes behind the packet", func(_ shape, p []byte) []byte { return append(p, 0, 0) }, cut, every},
		{"UDP length", func(s shape, p []byte) []byte { p[14+ipLen(s.inner6)+4] = 1; return p }, cut, carries(false)},
		{"SYN", l4(13, 2), tcpFlags, carries(true)},
		{"no flags", l4(13, 0), tcpFlags, carries(true)},
		{"longer than the MTU", func(s shape, _ []byte) []byte { return s.sent(random(1432)) }, mtu, every},
		{"a tunnel's packet by itself", func(s shape, p []byte) []byte {
			p = s.frame(p[:6], p[6:12], datagram(s.near(), s.far(), 17, s.received(p)[s.udp():]), s.inner6)
			sumHeader(p[14:], s.inner6)
			return p
		}, unknownFlow, func(s shape) bool { return !s.tcp }},
	}, shape.sent, b.send)
}

// A packet of a known flow is slow while any part of its entry is invalid.
func TestNotKnown(t *testing.T) {
	b := newBench(t)
	flow := func(change func(*overlayFlow)) func() { return func() { b.know(change) } }
	local := func(change func(*overlayLocal)) func() {
		return func() {
			var l overlayLocal
			must(t, b.c.maps.FlOvLocals.Lookup(address(b.near()), &l))
			change(&l)
			must(t, b.c.maps.FlOvLocals.Put(address(b.near()), l))
		}
	}
	for _, s := range []shape{{}, {bridged: true}, {outer6: true, summed: true, inner6: true}} {
		for _, x := range []struct {
			name          string
			change        func()
			receive, send int
		}{
			{"off", func() { n := b.network(); n.Flags &^= netOn; must(t, b.c.maps.FlOvNets.Put(uint32(1), n)) }, noNetwork, noNetwork},
			{"another generation", func() { n := b.network(); n.Gen++; must(t, b.c.maps.FlOvNets.Put(uint32(1), n)) }, generation, generation},
			{"no flow", func() { must(t, b.c.maps.FlOvFlows.Delete(b.flow())) }, unknownFlow, unknownFlow},
			{"leases over", flow(func(f *overlayFlow) { f.Dir[0].Until, f.Dir[1].Until = 1, 1 }), leaseOver, leaseOver},
			{"nothing sent", flow(func(f *overlayFlow) { f.Dir[0].Gen = 0 }), oneWay, generation},
			{"nothing received", flow(func(f *overlayFlow) { f.Dir[1].Gen = 0 }), generation, oneWay},
			{"conntrack not ready", flow(func(f *overlayFlow) { f.Ready = 0 }), notReady, notReady},
			{"sent by another end", flow(func(f *overlayFlow) { f.End = 12345 }), fastPath, header},
			{"no local", func() { must(t, b.c.maps.FlOvLocals.Delete(address(b.near()))) }, noLocal, noLocal},
			{"no remote", func() { must(t, b.c.maps.FlOvRemotes.Delete(b.remote(b.nic))) }, noRemote, noRemote},
			{"not sent by this uplink", flow(func(f *overlayFlow) { f.Uplink = 54321 }), source, noRemote},
			{"by another uplink", func() { b.elsewhere(12345, 6) }, source, fastPath},
			{"by another next hop", func() { b.elsewhere(12345, 5) }, fastPath, fastPath},
			{"no way", local(func(l *overlayLocal) { l.Way = 0 }), way, way},
			{"address of another end", local(func(l *overlayLocal) { l.Ifindex = 12345 }), fastPath, header},
		} {
			b.fill(s)
			x.change()
			if _, _, why := b.receive(s.received(random(20))); why != x.receive {
				t.Errorf("%s, %s: received: reason %d, want %d", s.name(), x.name, why, x.receive)
			}
			if _, _, why := b.send(s.sent(random(20))); why != x.send {
				t.Errorf("%s, %s: sent: reason %d, want %d", s.name(), x.name, why, x.send)
			}
		}
	}
}

// elsewhere has the flow sent by another uplink, of a group.
func (b *bench) elsewhere(index, group uint32) {
	b.Helper()
	var r overlayRemote
	must(b.TB, b.c.maps.FlOvRemotes.Lookup(b.remote(b.nic), &r))
	r.Self.Uplink = index
	copy(r.Headers[6:], mac("02:00:00:00:00:99"))
	must(b.TB, b.c.maps.FlOvRemotes.Put(r.Self, r))
	must(b.TB, b.c.maps.FlOvUplinks.Put(index, overlayUplink{Mtu: 1500, Group: group}))
	b.know(func(f *overlayFlow) { f.Uplink = index })
}

// However many flows a container has, others keep theirs and get more.
func TestShares(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := shape{bridged: true, tcp: true}
	b.fill(s)
	for slot := range uint16(3) {
		must(t, b.c.maps.FlOvEnds.Put(overlayEndKey{Net: 1, Ifindex: 100 + uint32(slot)}, overlayEnd{Way: wayOut, Slot: slot + 2, Mtu: 1450}))
	}
	p, err := b.c.program(overlayProgFlOvTunnel, 1)()
	must(t, err)
	defer p.Close()
	flows := func(end uint32, from, to int) (left int) {
		for i := from; i < to; i++ {
			packet := s.sent(random(20))
			put16(packet[34:], uint16(i))
			put16(packet[36:], uint16(i>>16))
			packet[29] = byte(end) // the address
			sumInner(packet[14:], false)
			must(t, b.ns.Do(func() error {
				_, err := p.Run(&ebpf.RunOptions{Data: packet, Context: skb{Ifindex: b.nic, Ingress: end}, Repeat: 32})
				return err
			}))
		}
		var k overlayFlowKey
		must(t, keys(b.c.maps.FlOvFlows, &k, func() {
			if k.Local.Ip[15] == byte(end) {
				left++
			}
		}))
		return left
	}
	most := int(b.c.maps.FlOvFlows.MaxEntries())
	if left := flows(100, 0, 100); left != 100 {
		t.Fatalf("%d of 100 flows are learnt", left)
	}
	if left := flows(101, 0, most+1000); left > most/2 {
		t.Errorf("one container has %d of %d flows", left, most)
	}
	if left := flows(102, 0, 100); left != 100 {
		t.Errorf("a third container has %d of 100 flows", left)
	}
	if left := flows(100, 0, 0); left != 100 {
		t.Errorf("the first container has %d of 100 flows", left)
	}
	time.Sleep(lease + kept + coarse)
	must(t, b.c.sweep())
	if left := flows(101, 0, 10); left != 10 {
		t.Errorf("%d flows after all were over", left)
	}
}

// A flow is learnt after so many packets, however soon they follow each other. What is learnt counts
// for less than a second, with the tick of the clock and time for a sender to get a CPU.
func TestYoung(t *testing.T) {
	b := newBench(t)
	b.fill(shape{bridged: true, tcp: true})
	must(t, b.c.maps.FlOvFlows.Delete(b.flow()))
	began := b.now()
	for range 32 {
		b.run(overlayProgFlOvTunnel, 1, b.sent(random(20)), skb{Ifindex: b.nic, Ingress: b.veth})
	}
	var f overlayFlow
	must(t, b.c.maps.FlOvFlows.Lookup(b.flow(), &f))
	until := f.Dir[out].Until
	if until < began+uint64(lease) || until > b.now()+uint64(lease) || lease+coarse > 800*time.Millisecond {
		t.Errorf("the lease is over %v after it began", time.Duration(until-began))
	}
}

// A container that only sends after one answer, and has received nothing before, is fast.
func TestOneWay(t *testing.T) {
	for _, form := range []string{routed, bridged} {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			r.onTracked()
			time.Sleep(settle + coarse)
			var server net.PacketConn
			must(t, r.nodes[1].web.Do(func() (err error) {
				server, err = net.ListenPacket("udp", ":9001")
				return err
			}))
			defer server.Close()
			d, buf := dial(t, r.nodes[0].web, "udp", r.nodes[1].addr), make([]byte, 1)
			go func() {
				if _, from, err := server.ReadFrom(buf); err == nil {
					server.WriteTo(buf, from)
				}
			}()
			d.ask(t, 1)
			must(t, d.SetDeadline(time.Time{}))
			testkit.Await(t, "what it sends is fast", func() bool {
				for range 40 {
					d.Write([]byte{0})
				}
				return r.nodes[0].report(t).Egress.Fast > 40
			})
		})
	}
}

// PREEMPT_RT is refused since its softirqs can preempt each other.
func TestMixes(t *testing.T) {
	if rt := "#1 SMP PREEMPT_RT"; mixes("6.18.44", "#1 SMP PREEMPT_DYNAMIC Debian") || mixes("6.12.9-rt", rt) || !mixes("6.18.44-rt1", rt) || !mixes("7.0.0", rt) {
		t.Error("another kernel is refused")
	}
}

// A sender cannot choose the place of its flow, and a flow without a local sender has none.
func TestPlaces(t *testing.T) {
	for _, s := range []shape{{}, {bridged: true}} {
		var places []uint32
		for range 2 {
			b := newBench(t)
			send := func(stranger bool) (at []uint32) {
				b.fill(s)
				if stranger {
					must(t, b.c.maps.FlOvLocals.Delete(address(b.near())))
					must(t, b.c.maps.FlOvEnds.Delete(overlayEndKey{Net: 1, Ifindex: b.veth}))
				}
				b.run(overlayProgFlOvTunnel, 1, s.sent(random(20)), skb{Ifindex: b.nic, Ingress: b.veth})
				var place uint32
				var value overlaySight
				for it := b.c.maps.FlOvSights.Iterate(); it.Next(&place, &value); {
					if value.Tag != 0 {
						at = append(at, place)
					}
				}
				return at
			}
			if at := send(true); len(at) > 0 {
				t.Errorf("%s: a stranger's flow has the place %d", s.name(), at)
			}
			places = append(places, send(false)...)
		}
		if len(places) != 2 || places[0] == places[1] {
			t.Errorf("%s: the places are %d", s.name(), places)
		}
	}
}

// A packet that is truncated anywhere is slow, or belongs to no network; the same for a truncated
// tunnel packet inside a tunnel packet.
func TestTruncated(t *testing.T) {
	b := newBench(t)
	for _, s := range shapes() {
		b.fill(s)
		in, out := s.received(random(20)), s.sent(random(20))
		for n := 14 + ipLen(s.outer6); n < len(in); n++ {
			if verdict, _, why := b.receive(slices.Clone(in[:n])); verdict != next || why == fastPath {
				t.Errorf("%s: %d bytes received: verdict %d, reason %d", s.name(), n, int32(verdict), why)
			}
		}
		for n := 14 + ipLen(s.inner6); n < len(out); n++ {
			if verdict, _, why := b.send(slices.Clone(out[:n])); verdict != next || why == fastPath {
				t.Errorf("%s: %d bytes sent: verdict %d, reason %d", s.name(), n, int32(verdict), why)
			}
		}
	}
}

// A container sends a packet of its flow that the tunnel device drops, and then, as payload of a packet
// to another destination, the frame that the tunnel device would have made. The other packets of the
// network still arrive.
func TestForgedHeaders(t *testing.T) {
	s := shape{}
	_, list := twins(t, routed)
	must(t, list[0].apply(t, true))
	w, n := list[0], uint64(0)
	elsewhere := netip.MustParseAddr("10.66.0.77")
	must(t, w.host.Neighbour("nic0", elsewhere, "02:00:00:00:00:77"))
	pinned(t, func() {
		accelerate(t, s, list, &n)
		w.nft(t, `table inet fl_lost { chain output { type filter hook output priority 0; ip daddr 10.66.0.1 udp dport 8472 drop; }; }`)
		for range 20 {
			n++
			lost := s.sent(payload(n, 20))
			copy(lost[6:], mac("02:00:00:00:00:99")) // slow
			inject(t, w.inside, lost)
			near, far := s.macs()
			in := s.frame(far, near, lost[14:], false)
			_, node := s.nodes()
			forged := s.encapsulated(gateway, nearWeb, s.near(), node, in)
			copy(forged[30:], elsewhere.AsSlice())
			s.sum(forged)
			inject(t, w.inside, forged)
			inject(t, w.inside, s.sent(payload(n, 30)))
		}
		mark := payload(n, 21)
		end := s.sent(mark)
		copy(end[30:], elsewhere.AsSlice()) // by no tunnel
		sumInner(end[14:], false)
		inject(t, w.inside, end)
		forwarded := 0
		for _, b := range until(t, w.wire, mark) {
			if !bytes.Equal(b[30:34], elsewhere.AsSlice()) {
				continue
			}
			if forwarded++; bytes.Contains(b, random(30)) {
				t.Errorf("sent elsewhere:\n%x", b)
			}
		}
		if forwarded == 0 {
			t.Error("what the container sent by itself did not come through")
		}
	})
}
