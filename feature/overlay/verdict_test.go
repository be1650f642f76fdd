package overlay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// enum reason of maps.bpf.h
const (
	_ = iota // fastPath
	unknownFlow
	leaseOver
	generation
	oneWay
	notReady
	noLocal
	noRemote
	off
	options
	fragment
	ttl
	mtu
	protocol
	tcpFlags
	header
	source
	checksum
	way
	cut
	room
)

// noNetwork is a packet outside all networks, which is not counted.
const noNetwork = -1

// bench is the programs with caches filled by hand, in a namespace with an uplink nic0 and a host
// end veth0. Its network is number 1.
type bench struct {
	testing.TB
	shape
	c         *cache
	ns        *testkit.NS
	nic, veth uint32
	until     uint64
	flags     uint32
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{TB: t, ns: testkit.NetNS(t)}
	testkit.Veth(t, b.ns, "nic0", b.ns, "veth0")
	h := b.ns.Handle(t)
	for name, index := range map[string]*uint32{"nic0": &b.nic, "veth0": &b.veth} {
		l, err := h.LinkByName(name)
		must(t, err)
		must(t, h.LinkSetHardwareAddr(l, map[string][]byte{"nic0": nearNIC, "veth0": mac("02:00:00:00:00:42")}[name]))
		*index = uint32(l.Attrs().Index)
	}
	var err error
	b.c, err = openCache(nil)
	must(t, err)
	t.Cleanup(func() { must(t, b.c.close()) })
	b.until = b.now() + 3600e9
	// Any flow may have an entry.
	keys, values := make([]uint32, b.c.maps.FlOvSights.MaxEntries()), make([]overlaySight, b.c.maps.FlOvSights.MaxEntries())
	for i := range keys {
		keys[i], values[i].Until = uint32(i), uint32(b.until/1e6)
	}
	_, err = b.c.maps.FlOvSights.BatchUpdate(keys, values, nil)
	must(t, err)
	return b
}

// now is the clock of the programs, which lags by up to a tick.
func (b *bench) now() uint64 {
	var now unix.Timespec
	must(b.TB, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now))
	return uint64(now.Nano())
}

func address(a netip.Addr) (v overlayHostKey) {
	v.Net, v.Ip.Ip = 1, a.As16()
	return v
}

// remote is the key of the other node's container, by an uplink.
func (b *bench) remote(uplink uint32) (v overlayHostKey) {
	v = address(b.far())
	v.Uplink = uplink
	return v
}

func (b *bench) network() (v overlayNetwork) {
	v.Gen, v.Flags, v.Tunnel, v.Mtu, v.Low, v.High = 7, netOn, 99, 1450, 32768, 60999
	if !b.bridged {
		v.Flags |= netRouted
	}
	v.Word, v.Vni, v.Port = bits.ReverseBytes32(0x08000000), bits.ReverseBytes32(vni<<8), fromNetwork(b.port())
	if b.geneve {
		v.Word = bits.ReverseBytes32(0x6558)
	}
	return v
}

func (b *bench) flow() (k overlayFlowKey) {
	k.Net, k.Local.Ip, k.Remote.Ip, k.Proto = 1, b.near().As16(), b.far().As16(), uint32(b.proto())
	k.Lport, k.Rport = fromNetwork(nearPort), fromNetwork(farPort)
	return k
}

// headers returns those in front of what is sent to the other node.
func (b *bench) headers() []byte {
	near, far := b.macs()
	nearNode, farNode := b.nodes()
	return b.encapsulated(farNIC, nearNIC, nearNode, farNode, b.frame(far, near, nil, b.inner6))
}

// fill enters a flow of the shape into the caches.
func (b *bench) fill(s shape) {
	t := b.TB
	t.Helper()
	b.shape = s
	m := b.c.maps
	n := b.network()
	must(t, m.FlOvNets.Put(uint32(1), n))
	for _, k := range tunnelsOf(n) {
		must(t, m.FlOvTunnels.Put(k, uint32(1)))
	}
	must(t, m.FlOvBeat.Put(uint32(0), b.until))
	must(t, m.FlOvUplinks.Put(b.nic, overlayUplink{Mtu: 1500, Group: 5}))
	end := overlayEnd{Way: wayPeer | wayOut, Slot: 1, Mtu: 1450}
	copy(end.Mac[:], nearWeb)
	must(t, m.FlOvEnds.Put(overlayEndKey{Net: 1, Ifindex: b.veth}, end))
	l := overlayLocal{Until: b.until, Gen: n.Gen, Ifindex: b.veth, Way: wayPeer | wayOut, Slot: 1, Mtu: 1450}
	copy(l.Mac[:], nearWeb)
	copy(l.Gateway[:], gateway)
	must(t, m.FlOvLocals.Put(address(b.near()), l))
	r := overlayRemote{Until: b.until, Gen: n.Gen, Self: b.remote(b.nic), Mtu: 1500}
	r.Bytes = uint16(copy(r.Headers[:], b.headers()))
	if b.summed {
		r.Summed = 1
	}
	must(t, m.FlOvRemotes.Put(r.Self, r))
	b.know(func(*overlayFlow) {})
	cpus, err := ebpf.PossibleCPU()
	must(t, err)
	must(t, m.FlOvNotes.Put(uint32(0), make([]overlayNote, cpus)))
}

// know changes the flow's entry. One to a service has an entry for each direction, sealed to its key.
func (b *bench) know(change func(*overlayFlow)) {
	b.Helper()
	f := overlayFlow{Ready: 1, Uplink: b.nic}
	for i := range f.Dir {
		f.Dir[i].Until, f.Dir[i].Gen = b.until, 7
	}
	change(&f)
	k, far := b.flow(), netip.AddrPortFrom(b.far(), farPort)
	for _, x := range [][2]netip.AddrPort{{b.peer(), far}, {far, b.peer()}} {
		k.Remote.Ip, k.Rport = x[0].Addr().As16(), fromNetwork(x[0].Port())
		if b.service {
			f.To.Ip.Ip, f.To.Port = x[1].Addr().As16(), fromNetwork(x[1].Port())
			f.To.Seal = b.seal(k, f.To.Ip.Ip, f.To.Port)
		}
		must(b.TB, b.c.maps.FlOvFlows.Put(k, f))
	}
}

// seal is the one of learn.bpf.h.
func (b *bench) seal(k overlayFlowKey, ip [16]byte, port uint16) uint32 {
	mix := func(h uint64, v uint64) uint64 { // fl_mix
		h = (h ^ v) * 0x9fb21c651e98df25
		return h ^ h>>29
	}
	both := func(x, y []byte) uint64 {
		return uint64(binary.NativeEndian.Uint32(x))<<32 | uint64(binary.NativeEndian.Uint32(y))
	}
	h := b.c.secret ^ (uint64(k.Net)<<40 | uint64(k.Proto)<<32 | uint64(k.Lport)<<16 | uint64(k.Rport))
	for i := 0; i < 16; i += 4 {
		h = mix(h, both(k.Local.Ip[i:], k.Remote.Ip[i:]))
	}
	h = mix(mix(h>>32, both(ip[:], ip[4:])), both(ip[8:], ip[12:]))
	return max(1, uint32(mix(h, uint64(port))>>32))
}

// skb is the first part of struct __sk_buff, as far as a test run takes it.
type skb struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTCI, VlanProto, Priority, Ingress, Ifindex uint32
	_                                                                                                       [37]uint32
}

// run passes a packet to a program, and returns the verdict, the packet afterwards, and the reason
// why it was slow.
func (b *bench) run(program string, network uint32, packet []byte, ctx skb) (verdict uint32, out []byte, why int) {
	t := b.TB
	t.Helper()
	p, err := b.c.program(program, network)()
	must(t, err)
	defer p.Close()
	before := b.counted()
	out = make([]byte, len(packet)+256)
	opts := ebpf.RunOptions{Data: packet, DataOut: out, Context: ctx, Flags: b.flags}
	must(t, b.ns.Do(func() error {
		verdict, err = p.Run(&opts)
		if errors.Is(err, unix.EINVAL) && b.flags != 0 { // an older kernel
			b.flags, opts.Flags = 0, 0
			verdict, err = p.Run(&opts)
		}
		testkit.Is(t, b.name(), err, nil)
		return nil
	}))
	why = noNetwork
	for i, n := range b.counted() {
		if n != before[i] {
			why = i
		}
	}
	return verdict, opts.DataOut, why
}

func (b *bench) counted() (sums [21]uint64) {
	var list []overlayCounts
	must(b.TB, b.c.maps.FlOvCounts.Lookup(uint32(1), &list))
	for _, c := range list {
		for _, dir := range c.Packets {
			for i, n := range dir {
				sums[i] += n
			}
		}
	}
	return sums
}

const (
	next     = ^uint32(0) // TCX_NEXT
	redirect = 7          // TCX_REDIRECT
)

// receive passes a packet of the uplink, send one of the container.
func (b *bench) receive(packet []byte) (uint32, []byte, int) {
	b.Helper()
	return b.run(overlayProgFlOvReceive, 0, packet, skb{Ifindex: b.nic})
}

func (b *bench) send(packet []byte) (uint32, []byte, int) {
	b.Helper()
	return b.run(overlayProgFlOvSend, 1, packet, skb{Ifindex: b.veth})
}

// inner is the frame as the container gets it.
func (b *bench) inner(packet []byte) []byte {
	in := slices.Clone(packet[b.innerEth():])
	if !b.bridged {
		copy(in, slices.Concat(nearWeb, gateway))
		hop(in[14:], b.inner6)
	}
	b.other(in, true, b.peer())
	return in
}

// other makes the source or destination of a frame another.
func (b *bench) other(f []byte, source bool, to netip.AddrPort) {
	ip, l4 := 14+ipLen(b.inner6), 14+ipLen(b.inner6)+2
	if source {
		ip, l4 = ip-to.Addr().BitLen()/8, l4-2
	}
	copy(f[ip-to.Addr().BitLen()/8:], to.Addr().AsSlice())
	put16(f[l4:], to.Port())
	sumInner(f[14:], b.inner6)
}

func hop(ip []byte, v6 bool) {
	if v6 {
		ip[7]--
		return
	}
	ip[8]--
	sumHeader(ip, false)
}

// A packet of a known flow loses its outer headers and one hop, and nothing else.
func TestDecapsulate(t *testing.T) {
	b := newBench(t)
	b.flags = 4 // BPF_F_TEST_SKB_CHECKSUM_COMPLETE: the sum of all bytes has to stay right
	for _, s := range shapes() {
		b.fill(s)
		for _, size := range []int{0, 1, 2, 999, 1300} {
			packet := s.received(random(size))
			if size == 999 { // congestion before the tunnel, which says outside that it can be marked
				setTOS(packet[s.innerIP():], s.inner6, 3)
				setTOS(packet[14:], s.outer6, 2)
				s.sum(packet)
			}
			verdict, out, why := b.receive(packet)
			if verdict != redirect || why != fastPath {
				t.Errorf("%s, %d bytes: verdict %d, reason %d", s.name(), size, verdict, why)
			} else if want := b.inner(packet); !bytes.Equal(out, want) {
				t.Errorf("%s, %d bytes:\n%x, want\n%x", s.name(), size, out, want)
			}
		}
	}
}

// A packet of a known flow gets the headers that the tunnel device would write.
func TestEncapsulate(t *testing.T) {
	b := newBench(t)
	for _, s := range shapes() {
		b.fill(s)
		for _, size := range []int{0, 1, 2, 999, 1300} {
			for ecn := range byte(4) {
				packet := s.sent(random(size))
				setTOS(packet[14:], s.inner6, 0x28|ecn)
				verdict, out, why := b.send(packet)
				name := fmt.Sprintf("%s, %d bytes, ECN %d", s.name(), size, ecn)
				if verdict != redirect || why != fastPath {
					t.Errorf("%s: verdict %d, reason %d", name, verdict, why)
					continue
				}
				if err := b.encapsulates(packet, out, ecn); err != nil {
					t.Errorf("%s: %v\n%x", name, err, out)
				}
			}
		}
	}
}

func setTOS(ip []byte, v6 bool, tos byte) {
	if v6 {
		ip[0], ip[1] = ip[0]&0xf0|tos>>4, ip[1]&0xf|tos<<4
		return
	}
	ip[1] = tos
	sumHeader(ip, false)
}

// encapsulates returns how a sent packet differs from the tunnel device's.
func (b *bench) encapsulates(packet, out []byte, ecn byte) error {
	if ecn == 3 {
		ecn = 2 // a router on the way has set it
	}
	near, far := b.macs()
	nearNode, farNode := b.nodes()
	in := slices.Clone(packet)
	if !b.bridged {
		copy(in, slices.Concat(far, near))
		hop(in[14:], b.inner6)
	}
	b.other(in, false, netip.AddrPortFrom(b.far(), farPort))
	want := b.encapsulated(farNIC, nearNIC, nearNode, farNode, in)
	if len(out) != len(want) {
		return fmt.Errorf("%d bytes, want %d", len(out), len(want))
	}
	port := binary.BigEndian.Uint16(out[b.udp():])
	if port < 32768 || port >= 60999 {
		return fmt.Errorf("source port %d", port)
	}
	put16(want[b.udp():], port)
	if !b.outer6 {
		copy(want[18:20], out[18:20]) // id
	}
	setTOS(want[14:], b.outer6, ecn)
	sumHeader(want[14:], b.outer6)
	b.sumOuter(want)
	if !bytes.Equal(out, want) {
		return fmt.Errorf("want\n%x", want)
	}
	if b.summed && l4Sum(out[14:], b.outer6, b.udp()-14, 17) != 0xffff {
		return fmt.Errorf("the sum of all bytes is %x", l4Sum(out[14:], b.outer6, b.udp()-14, 17))
	}
	return nil
}

func random(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + n)
	}
	return b
}
