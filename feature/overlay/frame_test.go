package overlay

import (
	"encoding/binary"
	"net"
	"net/netip"
	"reflect"
	"slices"
)

// Addresses in crafted packets: a container of this node, one of another node, and the devices in
// between. The two containers' MACs differ in many bits, or a bridge would confuse them.
var (
	nearNIC, farNIC       = mac("02:00:00:00:00:02"), mac("02:00:00:00:00:01")
	nearTunnel, farTunnel = mac("02:00:00:00:00:12"), mac("02:00:00:00:00:11")
	nearWeb, farWeb       = mac("02:00:00:00:00:22"), mac("02:00:00:00:00:dd")
	gateway               = mac("02:00:00:00:00:32")
)

const (
	nearPort, farPort = 9000, 40000
	vni               = 42
)

func mac(s string) net.HardwareAddr {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

// shape is a form of a tunnel's packet.
type shape struct {
	bridged bool
	outer6  bool
	inner6  bool
	tcp     bool
	geneve  bool
	summed  bool // the outer header has a checksum
	service bool // the container sends to a service, of which the other is the backend
}

func (s shape) name() string {
	name := "shape"
	for v, i := reflect.ValueOf(s), 0; i < v.NumField(); i++ {
		if v.Field(i).Bool() {
			name += " " + v.Type().Field(i).Name
		}
	}
	return name
}

// shapes are all that a kernel makes: outer IPv6 has a checksum. Services are for routed networks.
func shapes() (list []shape) {
	for i := range 128 {
		s := shape{i&1 != 0, i&2 != 0, i&4 != 0, i&8 != 0, i&16 != 0, i&32 != 0, i&64 != 0}
		if (s.summed || !s.outer6) && !(s.service && s.bridged) {
			list = append(list, s)
		}
	}
	return list
}

// Offsets in a tunnel's packet, and in the inner frame.
func (s shape) udp() int      { return 14 + ipLen(s.outer6) }
func (s shape) tunnel() int   { return s.udp() + 8 }
func (s shape) innerEth() int { return s.tunnel() + 8 }
func (s shape) innerIP() int  { return s.innerEth() + 14 }
func (s shape) innerL4() int  { return s.innerIP() + ipLen(s.inner6) }

func ipLen(v6 bool) int {
	if v6 {
		return 40
	}
	return 20
}

// near and far are the addresses of the containers.
func (s shape) near() netip.Addr {
	return s.pick("10.244.1.2", "fd00:244:1::2", "10.244.0.3", "fd00:244::3")
}

func (s shape) far() netip.Addr {
	return s.pick("10.244.0.2", "fd00:244:0::2", "10.244.0.2", "fd00:244::2")
}

func (s shape) pick(ip, ip6, bridged, bridged6 string) netip.Addr {
	if s.bridged {
		ip, ip6 = bridged, bridged6
	}
	if s.inner6 {
		ip = ip6
	}
	return netip.MustParseAddr(ip)
}

// peer is what the container sends to.
func (s shape) peer() netip.AddrPort {
	switch {
	case s.service && s.inner6:
		return netip.MustParseAddrPort("[fd00:96::10]:80")
	case s.service:
		return netip.MustParseAddrPort("10.96.0.10:80")
	}
	return netip.AddrPortFrom(s.far(), farPort)
}

// serviceRules lead from services to the other node's container. They drop unsolicited packets, because
// NAT would choose another source port at random where such a packet takes a flow's place.
const serviceRules = `table inet fl_svc {
	chain n { type nat hook prerouting priority -100;
		ip daddr 10.96.0.10 udp dport 80 dnat ip to 10.244.0.2:40000; ip6 daddr fd00:96::10 udp dport 80 dnat ip6 to [fd00:244::2]:40000; };
	chain f { type filter hook prerouting priority -150; iifname "vx0" ct state new udp dport != 9845 drop; };
}`

func (s shape) nodes() (near, far netip.Addr) {
	if s.outer6 {
		return netip.MustParseAddr("fd00:66::2"), netip.MustParseAddr("fd00:66::1")
	}
	return netip.MustParseAddr("10.66.0.2"), netip.MustParseAddr("10.66.0.1")
}

// macs are the addresses of the inner frame in the tunnel, nearest first.
func (s shape) macs() (near, far []byte) {
	if s.bridged {
		return nearWeb, farWeb
	}
	return nearTunnel, farTunnel
}

func (s shape) port() uint16 {
	if s.geneve {
		return 6081
	}
	return 8472
}

// received is a packet from the other node as it arrives at the uplink.
func (s shape) received(payload []byte) []byte {
	near, far := s.macs()
	nearNode, farNode := s.nodes()
	inner := s.frame(near, far, datagram(s.far(), s.near(), s.proto(), s.l4(farPort, nearPort, payload)), s.inner6)
	b := s.encapsulated(nearNIC, farNIC, farNode, nearNode, inner)
	s.sum(b)
	return b
}

// sent is a packet as the container of this node sends it.
func (s shape) sent(payload []byte) []byte {
	dst := gateway
	if s.bridged {
		dst = farWeb
	}
	b := s.frame(dst, nearWeb, datagram(s.near(), s.peer().Addr(), s.proto(), s.l4(nearPort, s.peer().Port(), payload)), s.inner6)
	sumInner(b[14:], s.inner6)
	return b
}

func (s shape) encapsulated(dst, src []byte, from, to netip.Addr, inner []byte) []byte {
	header := []byte{8, 0, 0, 0, 0, 0, vni, 0}
	if s.geneve {
		header = []byte{0, 0, 0x65, 0x58, 0, 0, vni, 0}
	}
	b := slices.Concat(make([]byte, 8), header, inner)
	binary.BigEndian.PutUint16(b, 50000)
	binary.BigEndian.PutUint16(b[2:], s.port())
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	return s.frame(dst, src, datagram(from, to, 17, b), s.outer6)
}

func (s shape) frame(dst, src []byte, ip []byte, v6 bool) []byte {
	kind := []byte{8, 0}
	if v6 {
		kind = []byte{0x86, 0xdd}
	}
	return slices.Concat(dst, src, kind, ip)
}

func (s shape) proto() byte {
	if s.tcp {
		return 6
	}
	return 17
}

// datagram is an IP packet, without the checksum.
func datagram(src, dst netip.Addr, proto byte, l4 []byte) []byte {
	if src.Is4() {
		b := []byte{0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, proto, 0, 0}
		binary.BigEndian.PutUint16(b[2:], uint16(20+len(l4)))
		return slices.Concat(b, src.AsSlice(), dst.AsSlice(), l4)
	}
	b := []byte{0x60, 0, 0, 0, 0, 0, proto, 64}
	binary.BigEndian.PutUint16(b[4:], uint16(len(l4)))
	return slices.Concat(b, src.AsSlice(), dst.AsSlice(), l4)
}

// l4 is a UDP datagram, or a TCP segment with ACK and PSH.
func (s shape) l4(from, to uint16, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from), to)
	if s.tcp {
		b = append(b, 0, 0, 0x10, 0, 0, 0, 0x20, 0, 0x50, 0x18, 0x20, 0, 0, 0, 0, 0)
	} else {
		b = append(binary.BigEndian.AppendUint16(b, uint16(8+len(payload))), 0, 0)
	}
	return append(b, payload...)
}

// sum writes the checksums of a tunnel's packet, the innermost first.
func (s shape) sum(b []byte) {
	sumInner(b[s.innerIP():], s.inner6)
	sumHeader(b[14:], s.outer6)
	s.sumOuter(b)
}

func (s shape) sumOuter(b []byte) {
	put16(b[s.udp()+6:], 0)
	if s.summed {
		sumL4(b[14:], s.outer6, s.udp()-14, 17, 6)
	}
}

func put16(b []byte, v uint16) { binary.BigEndian.PutUint16(b, v) }

// sumInner writes the checksums of an IP packet, by its header.
func sumInner(ip []byte, v6 bool) {
	sumHeader(ip, v6)
	proto := ip[9]
	if v6 {
		proto = ip[6]
	}
	if offset, ok := map[byte]int{6: 16, 17: 6}[proto]; ok {
		sumL4(ip, v6, ipLen(v6), proto, offset)
	}
}

func sumHeader(ip []byte, v6 bool) {
	if !v6 {
		put16(ip[10:], 0)
		put16(ip[10:], ^folded(ip[:20], 0))
	}
}

// sumL4 writes the checksum at an offset of the transport header at at.
func sumL4(ip []byte, v6 bool, at int, proto byte, offset int) {
	put16(ip[at+offset:], 0)
	sum := ^l4Sum(ip, v6, at, proto)
	if sum == 0 {
		sum = 0xffff
	}
	put16(ip[at+offset:], sum)
}

// l4Sum returns the sum of a datagram and its pseudo header: 0xffff if it is right.
func l4Sum(ip []byte, v6 bool, at int, proto byte) uint16 {
	from := 12
	if v6 {
		from = 8
	}
	return folded(ip[at:], uint32(folded(ip[from:ipLen(v6)], 0))+uint32(proto)+uint32(len(ip)-at))
}

func folded(b []byte, sum uint32) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 != 0 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}
