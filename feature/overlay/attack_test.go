package overlay

import (
	"bytes"
	"slices"
	"testing"
)

// attack is a change of good packets of some shapes. Unless raw, their checksums are then corrected.
type attack struct {
	name   string
	change func(s shape, p []byte) []byte
	why    int
	of     func(shape) bool
}

// set writes bytes at an offset.
func set(at func(shape) int, n int, b ...byte) func(shape, []byte) []byte {
	return func(s shape, p []byte) []byte {
		copy(p[at(s)+n:], b)
		s.sum(p)
		return p
	}
}

// raw is set without corrected checksums.
func raw(at func(shape) int, n int, b ...byte) func(shape, []byte) []byte {
	return func(s shape, p []byte) []byte {
		copy(p[at(s)+n:], b)
		return p
	}
}

func xor(at func(shape) int, n int, v byte) func(shape, []byte) []byte {
	return func(s shape, p []byte) []byte {
		p[at(s)+n] ^= v
		return p
	}
}

func outerIP(shape) int { return 14 }
func frame(shape) int   { return 0 }

// outer and inner limit an attack to shapes with an outer or inner header of a family.
func outer(v6 bool) func(shape) bool    { return func(s shape) bool { return s.outer6 == v6 } }
func inner(v6 bool) func(shape) bool    { return func(s shape) bool { return s.inner6 == v6 } }
func every(shape) bool                  { return true }
func carries(tcp bool) func(shape) bool { return func(s shape) bool { return s.tcp == tcp } }

// What comes to the uplink and is unknown to the fast path takes the slow path, and its reason is
// counted.
func TestReceivedAttacks(t *testing.T) {
	b := newBench(t)
	b.attacks(receivedAttacks(), shape.received, b.receive)
}

// attacks passes good packets of all shapes that attacks have changed.
func (b *bench) attacks(table []attack, good func(shape, []byte) []byte, pass func([]byte) (uint32, []byte, int)) {
	for _, s := range shapes() {
		for _, row := range table {
			if !row.of(s) || row.name == "outer checksum" && !s.summed {
				continue
			}
			b.fill(s)
			packet := row.change(s, good(s, random(20)))
			verdict, out, why := pass(packet)
			if verdict != next || why != row.why || !bytes.Equal(out, packet) {
				b.Errorf("%s, %s: verdict %d, reason %d, want %d", s.name(), row.name, int32(verdict), why, row.why)
			}
		}
	}
}

// tag puts a VLAN tag into a frame.
func tag(p []byte, vid byte) []byte { return slices.Insert(p, 12, 0x81, 0, 0, vid) }

// sized corrects the outer lengths and checksums of a packet.
func (s shape) sized(p []byte) []byte {
	put16(p[s.udp()+4:], uint16(len(p)-s.udp()))
	if s.outer6 {
		put16(p[18:], uint16(len(p)-s.udp()))
	} else {
		put16(p[16:], uint16(len(p)-14))
	}
	sumHeader(p[14:], s.outer6)
	s.sumOuter(p)
	return p
}

// receivedAttacks are packets that come to an uplink.
func receivedAttacks() []attack {
	return []attack{
		// The outer frame.
		{"to another MAC", raw(frame, 0, 2, 9, 9, 9, 9, 9), noNetwork, every},
		{"broadcast", raw(frame, 0, 255, 255, 255, 255, 255, 255), noNetwork, every},
		{"VLAN tag", func(_ shape, p []byte) []byte { return tag(p, 5) }, noNetwork, every},
		{"priority tag", func(_ shape, p []byte) []byte { return tag(p, 0) }, noNetwork, every},
		{"ARP", raw(frame, 12, 8, 6), noNetwork, every},
		// The outer IP header.
		{"options", set(outerIP, 0, 0x46), noNetwork, outer(false)},
		{"version 4 in IPv6", raw(outerIP, 0, 0x40), noNetwork, outer(true)},
		{"no UDP", set(outerIP, 9, 47), noNetwork, outer(false)},
		{"hop-by-hop header", raw(outerIP, 6, 0), noNetwork, outer(true)},
		{"outer first fragment", set(outerIP, 6, 0x20, 0), fragment, outer(false)},
		{"outer later fragment", set(outerIP, 6, 0, 1), fragment, outer(false)},
		{"outer header checksum", xor(outerIP, 10, 1), checksum, outer(false)},
		{"from another node", set(outerIP, 15, 9), source, outer(false)},
		{"to another node", set(outerIP, 19, 9), source, outer(false)},
		{"from another node", set(outerIP, 23, 9), source, outer(true)},
		{"to another node", set(outerIP, 39, 9), source, outer(true)},
		{"outer length short", set(outerIP, 3, 60), cut, outer(false)},
		{"outer length long", raw(outerIP, 4, 5), cut, outer(true)},
		{"CE outside", func(s shape, p []byte) []byte { setTOS(p[14:], s.outer6, 3); return p }, header, every},
		{"ECT(0) outside only", func(s shape, p []byte) []byte { setTOS(p[14:], s.outer6, 2); return p }, header, every},
		{"ECT(0) outside, ECT(1) inside", func(s shape, p []byte) []byte {
			setTOS(p[s.innerIP():], s.inner6, 1)
			setTOS(p[14:], s.outer6, 2)
			s.sum(p)
			return p
		}, header, every},
		// The outer UDP header and that of the tunnel.
		{"another port", set(shape.udp, 2, 9, 9), noNetwork, every},
		{"UDP length short", func(s shape, p []byte) []byte { put16(p[s.udp()+4:], 60); return p }, cut, every},
		{"UDP length long", func(s shape, p []byte) []byte { put16(p[s.udp()+4:], 6000); return p }, cut, every},
		{"UDP length 0", func(s shape, p []byte) []byte { put16(p[s.udp()+4:], 0); return p }, cut, every},
		{"outer checksum", xor(shape.udp, 6, 1), checksum, every},
		{"outer checksum 0", raw(shape.udp, 6, 0, 0), checksum, outer(true)},
		{"another VNI", set(shape.tunnel, 6, 43), noNetwork, every},
		{"reserved byte behind the VNI", set(shape.tunnel, 7, 1), noNetwork, every},
		{"reserved bits", set(shape.tunnel, 1, 1), header, every},
		{"a flag more", set(shape.tunnel, 0, 0x88), header, every},
		{"no VNI", set(shape.tunnel, 0, 0), header, func(s shape) bool { return !s.geneve }},
		{"Geneve option", func(s shape, p []byte) []byte {
			p = slices.Insert(p, s.innerEth(), 1, 2, 0, 0)
			return s.sized(set(shape.tunnel, 0, 1)(s, p))
		}, header, func(s shape) bool { return s.geneve }},
		{"Geneve control packet", set(shape.tunnel, 1, 0x80), header, func(s shape) bool { return s.geneve }},
		{"Geneve of IP", set(shape.tunnel, 2, 8, 0), header, func(s shape) bool { return s.geneve }},
		// The inner frame.
		{"inner frame to another", set(shape.innerEth, 5, 9), header, every},
		{"inner broadcast", set(shape.innerEth, 0, 255, 255, 255, 255, 255, 255), header, every},
		{"inner frame from another", set(shape.innerEth, 11, 9), header, every},
		{"inner VLAN tag", func(s shape, p []byte) []byte {
			return s.sized(slices.Insert(p, s.innerEth()+12, 0x81, 0, 0, 5))
		}, protocol, every},
		{"inner ARP", raw(shape.innerEth, 12, 8, 6), protocol, every},
		{"IPv6 type before IPv4", raw(shape.innerEth, 12, 0x86, 0xdd), protocol, inner(false)},
		{"IPv4 type before IPv6", raw(shape.innerEth, 12, 8, 0), options, inner(true)},
		// The inner IP header.
		{"inner options", set(shape.innerIP, 0, 0x46), options, inner(false)},
		{"inner version 5", raw(shape.innerIP, 0, 0x50), protocol, inner(true)},
		{"inner first fragment", set(shape.innerIP, 6, 0x20, 0), fragment, inner(false)},
		{"inner later fragment", set(shape.innerIP, 6, 0, 1), fragment, inner(false)},
		{"inner fragment header", raw(shape.innerIP, 6, 44), fragment, inner(true)},
		{"inner hop-by-hop header", raw(shape.innerIP, 6, 0), protocol, inner(true)},
		{"ICMP", set(shape.innerIP, 9, 1), protocol, inner(false)},
		{"inner header checksum", xor(shape.innerIP, 10, 1), checksum, inner(false)},
		{"inner length short", func(s shape, p []byte) []byte { put16(p[s.innerIP()+2:], 40); s.sum(p); return p }, cut, inner(false)},
		{"inner length long", func(s shape, p []byte) []byte { put16(p[s.innerIP()+2:], 4000); s.sum(p); return p }, cut, inner(false)},
		{"inner length 0", func(s shape, p []byte) []byte { put16(p[s.innerIP()+2:], 0); s.sum(p); return p }, cut, inner(false)},
		{"inner length short", func(s shape, p []byte) []byte { put16(p[s.innerIP()+4:], 30); s.sum(p); return p }, cut, inner(true)},
		{"inner length 0", func(s shape, p []byte) []byte { put16(p[s.innerIP()+4:], 0); s.sum(p); return p }, cut, inner(true)},
		{"bytes behind the packet", func(s shape, p []byte) []byte { return s.sized(append(p, 0, 0)) }, cut, every},
		{"bytes behind the tunnel's packet", func(s shape, p []byte) []byte { return append(p, 0, 0) }, cut, every},
		{"TTL 1", set(shape.innerIP, 8, 1), ttl, func(s shape) bool { return !s.inner6 && !s.bridged }},
		{"hop limit 1", set(shape.innerIP, 7, 1), ttl, func(s shape) bool { return s.inner6 && !s.bridged }},
		{"from another container", set(shape.innerIP, 15, 9), unknownFlow, inner(false)},
		{"to another container", set(shape.innerIP, 19, 9), unknownFlow, inner(false)},
		{"from another container", set(shape.innerIP, 23, 9), unknownFlow, inner(true)},
		{"mapped address", set(shape.innerIP, 8, 0, 0, 0, 0, 0, 0, 0, 0), protocol, inner(true)},
		// The transport.
		{"from another port", set(shape.innerL4, 1, 9), unknownFlow, every},
		{"to another port", set(shape.innerL4, 3, 9), unknownFlow, every},
		{"UDP length long", func(s shape, p []byte) []byte { put16(p[s.innerL4()+4:], 900); s.sum(p); return p }, cut, carries(false)},
		{"UDP length short", func(s shape, p []byte) []byte { put16(p[s.innerL4()+4:], 9); s.sum(p); return p }, cut, carries(false)},
		{"UDP length 0", func(s shape, p []byte) []byte { put16(p[s.innerL4()+4:], 0); s.sum(p); return p }, cut, carries(false)},
		{"no UDP checksum", func(s shape, p []byte) []byte { put16(p[s.innerL4()+6:], 0); s.sumOuter(p); return p }, checksum,
			func(s shape) bool { return !s.tcp && s.summed }},
		{"SYN", set(shape.innerL4, 13, 0x02), tcpFlags, carries(true)},
		{"SYN and ACK", set(shape.innerL4, 13, 0x12), tcpFlags, carries(true)},
		{"FIN", set(shape.innerL4, 13, 0x11), tcpFlags, carries(true)},
		{"RST", set(shape.innerL4, 13, 0x04), tcpFlags, carries(true)},
		{"no flags", set(shape.innerL4, 13, 0), tcpFlags, carries(true)},
		{"TCP header of 16 bytes", set(shape.innerL4, 12, 0x40), cut, carries(true)},
		{"TCP header past the end", set(shape.innerL4, 12, 0xf0), cut, carries(true)},
	}
}
