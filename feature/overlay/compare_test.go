package overlay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// twin is one of two nodes that differ only in the fast path. Only the test is at the other end of
// its wire.
type twin struct {
	*node
	far                  *sandbox.Box // with the other end of the wire
	wire, inside, socket int          // packets on the wire, in the container, and at a process there
}

// twins returns two nodes: with the fast path, and without.
func twins(t *testing.T, form string) (r *rig, list [2]*twin) {
	t.Helper()
	r = &rig{Host: topology.New(t), form: form}
	for i, tag := range []string{"fast", "slow"} {
		n := &node{n: 1, tag: tag, host: r.Create(sandbox.Spec{Name: "host" + tag, Bare: true})}
		n.inside = n.host
		wire := r.Create(sandbox.Spec{Name: "wire" + tag, Bare: true})
		must(t, wire.Sysctl("ipv6/conf/default/disable_ipv6", "1"))
		r.Wire(sandbox.End{Box: n.host, Name: "nic0", Addr: netip.MustParsePrefix("10.66.0.2/24")}, sandbox.End{Box: wire, Name: "far0"})
		r.overlay(n)
		for _, d := range []struct {
			box *sandbox.Box
			dev string
			mac net.HardwareAddr
		}{{n.host, "nic0", nearNIC}, {n.host, "vx0", nearTunnel}, {n.host, "br0", gateway}, {n.web, "eth0", nearWeb}} {
			r.Change(d.box, d.dev, func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetHardwareAddr(l, d.mac) })
		}
		n.c.Interfaces[0].MAC = nearWeb.String()
		r.reach(n, 0, farTunnel, farWeb)
		s := shape{bridged: form == bridged}
		must(t, n.host.Neighbour("nic0", netip.MustParseAddr("10.66.0.1"), farNIC.String()))
		for _, s.inner6 = range []bool{false, true} {
			if s.bridged {
				must(t, n.web.Neighbour("eth0", s.far(), farWeb.String()))
				continue
			}
			must(t, n.host.Neighbour("br0", s.near(), nearWeb.String()))
			gw := netip.MustParseAddr("10.244.1.1")
			if s.inner6 {
				gw = netip.MustParseAddr("fd00:244:1::1")
			}
			must(t, n.web.Neighbour("eth0", gw, gateway.String()))
		}
		if form == routed {
			n.stateful(t)
		}
		r.feature(n)
		list[i] = &twin{node: n, far: wire, wire: tap(t, wire, "far0"), inside: tap(t, n.web, "eth0")}
		must(t, n.web.Do(func() (err error) {
			if list[i].socket, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			return errors.Join(
				unix.SetsockoptInt(list[i].socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20),
				unix.Bind(list[i].socket, &unix.SockaddrInet6{Port: nearPort}))
		}))
		t.Cleanup(func() { unix.Close(list[i].socket) })
	}
	return r, list
}

// tap opens a packet socket at a device of a box, to send and receive.
func tap(t testing.TB, b *sandbox.Box, dev string) (fd int) {
	t.Helper()
	must(t, b.Do(func() error {
		l, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: l.Index})) // ETH_P_ALL
	}))
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// inject sends a frame, unless it is longer than the device's MTU.
func inject(t testing.TB, fd int, frame []byte) {
	t.Helper()
	if _, err := unix.Write(fd, frame); err != nil && !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
}

// read returns the next frame, with its VLAN tag after it, or datagram; nil: there is none.
func read(t testing.TB, fd int) []byte {
	t.Helper()
	buf, oob := make([]byte, 2048), make([]byte, 64)
	n, k, _, _, err := unix.Recvmsg(fd, buf, oob, 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	must(t, err)
	if k >= 36 { // struct tpacket_auxdata behind a header
		if aux := oob[16:]; binary.NativeEndian.Uint32(aux)&unix.TP_STATUS_VLAN_VALID != 0 {
			return append(buf[:n], aux[16:18]...)
		}
	}
	return buf[:n]
}

// until reads frames up to one with the bytes of a mark, and returns those before it.
func until(t testing.TB, fd int, mark []byte) (list [][]byte) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		b := read(t, fd)
		switch {
		case b != nil && bytes.Contains(b, mark) && !icmp(b): // nor an error about it
			return list
		case b != nil:
			list = append(list, b)
		case time.Now().After(end):
			t.Fatalf("the mark has not come, after %d frames", len(list))
		default:
			poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			unix.Poll(poll, 100)
		}
	}
}

// cookie is in the payload of the test's packets, at both ends.
var cookie = []byte{0xc0, 0x0c, 0x1e, 0xaf, 0x5a}

func payload(n uint64, size int) []byte {
	b := binary.BigEndian.AppendUint64(slices.Clone(cookie), n)
	return slices.Concat(b, random(size), cookie)
}

// marked returns the frames with a cookie that are no ICMP: the kernel limits errors per second.
func marked(list [][]byte) (s []string) {
	for _, b := range list {
		if bytes.Contains(b, cookie) && !icmp(b) {
			s = append(s, string(b))
		}
	}
	return s
}

func icmp(b []byte) bool {
	return len(b) > 34 && (b[12] == 8 && b[13] == 0 && b[23] == 1 || b[12] == 0x86 && b[13] == 0xdd && b[20] == 58) ||
		len(b) > 84 && b[23] == 17 && icmp(b[50:])
}

// only returns what is in a more often than in b.
func only(a, b []string) (list []string) {
	left := make(map[string]int)
	for _, x := range b {
		left[x]++
	}
	for _, x := range a {
		if left[x]--; left[x] < 0 {
			list = append(list, x)
		}
	}
	return list
}

// fuzz breaks a packet. table are the known attacks.
func fuzz(r *rand.Rand, s shape, p []byte, table []attack) []byte {
	some := func(n int) int { return r.IntN(n) }
	headers := min(s.innerL4()+8, len(p))
	if len(table) == 0 {
		headers = 14 + ipLen(s.inner6) + 8
	}
	switch k := some(8); {
	case k == 0:
		p[some(len(p))] ^= 1 << some(8)
	case k == 1:
		for range 3 {
			p[some(headers)] ^= 1 << some(8)
		}
	case k == 2:
		p = p[:14+some(len(p)-14)]
	case k == 3:
		p = append(p, random(1+some(20))...)
	case k == 4 && len(table) > 0:
		p[14+some(headers-14)] ^= 1 << some(8)
		s.sum(p)
	case k == 4:
		p[14+some(headers-14)] ^= 1 << some(8)
		sumInner(p[14:], s.inner6)
	case k <= 6 && len(table) > 0:
		if a := table[some(len(table))]; a.of(s) {
			p = a.change(s, p)
		}
	}
	return p
}

// pinned runs fn on one CPU, so that packets are handled in the order of sending.
func pinned(t testing.TB, fn func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was, one unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &was))
	for i := range 1024 {
		if was.IsSet(i) {
			one.Set(i)
			break
		}
	}
	must(t, unix.SchedSetaffinity(0, &one))
	defer unix.SchedSetaffinity(0, &was)
	fn()
}

// got returns what the process in the container has received.
func (w *twin) got(t testing.TB) (list [][]byte) {
	t.Helper()
	for b := read(t, w.socket); b != nil; b = read(t, w.socket) {
		list = append(list, b)
	}
	return list
}

// accelerate makes the flow of a shape fast at the first node; the other sees the same.
func accelerate(t *testing.T, s shape, list [2]*twin, n *uint64) {
	t.Helper()
	to := &unix.SockaddrInet6{Port: int(s.peer().Port()), Addr: s.peer().Addr().As16()}
	for end := time.Now().Add(20 * time.Second); ; {
		before := list[0].report(t)
		for range 10 {
			*n++
			for _, w := range list {
				must(t, unix.Sendto(w.socket, random(20), 0, to)) // first: the other would be no answer
				inject(t, w.wire, s.received(payload(*n, 20)))
			}
			time.Sleep(time.Millisecond) // flows need some age
		}
		if now := list[0].report(t); now.Ingress.Fast >= before.Ingress.Fast+9 && now.Egress.Fast >= before.Egress.Fast+9 {
			return
		} else if time.Now().After(end) {
			t.Fatalf("it is not fast: %+v", now)
		}
	}
}

// What attackers send, on the wire or from a container, comes out as without the fast path.
func TestFastAgainstSlow(t *testing.T) {
	rounds := testkit.Scale(t, 1, 125)
	for _, s := range []shape{{}, {service: true}, {bridged: true}} {
		for _, s.inner6 = range []bool{false, true} {
			t.Run(s.name(), func(t *testing.T) {
				form := routed
				if s.bridged {
					form = bridged
				}
				_, list := twins(t, form)
				for _, w := range list {
					if s.service {
						w.nft(t, serviceRules)
					}
				}
				must(t, list[0].apply(t, true))
				seed := uint64(time.Now().UnixNano())
				t.Logf("seed %d", seed)
				pinned(t, func() { compare(t, s, list, rand.New(rand.NewPCG(seed, 0)), rounds) })
			})
		}
	}
}

// batch is how many packets of each direction are sent before the two nodes are compared. The intact
// ones among them keep the flow fast.
const batch = 1000

func compare(t *testing.T, s shape, list [2]*twin, r *rand.Rand, rounds int) {
	var n uint64
	table := receivedAttacks()
	before := list[0].report(t)
	spoilt := 0
	for range rounds {
		accelerate(t, s, list, &n)
		for range batch {
			n++
			in := fuzz(r, s, s.received(payload(n, 20)), table)
			out := fuzz(r, s, s.sent(payload(n, 20)), nil)
			for _, w := range list {
				inject(t, w.wire, in)
				inject(t, w.inside, out)
			}
		}
		var devices, sockets, wires [2][]string
		n++
		mark := payload(n, 21)
		for i, w := range list {
			inject(t, w.wire, s.to(otherPort, mark))
			devices[i] = marked(until(t, w.inside, mark))
			sockets[i] = marked(w.got(t))
			inject(t, w.inside, s.from(otherPort, mark))
			wires[i] = marked(s.alike(until(t, w.wire, mark)))
		}
		for _, x := range []struct {
			where string
			at    int // of the inner frame
			got   [2][]string
		}{{"in the container", 0, devices}, {"at the socket", 0, sockets}, {"on the wire", s.innerEth(), wires}} {
			for _, f := range only(x.got[0], x.got[1]) {
				if len(f) > x.at && wrongSum([]byte(f[x.at:]), s.inner6) && x.where != "at the socket" {
					spoilt++ // no socket gets it, here or there
					continue
				}
				t.Errorf("%s only with the fast path:\n%x", x.where, f)
			}
			for _, f := range only(x.got[1], x.got[0]) {
				t.Errorf("%s only without the fast path:\n%x", x.where, f)
			}
		}
		if t.Failed() {
			return
		}
	}
	now := list[0].report(t)
	t.Logf("%d packets, %d in and %d out were fast, %d spoilt ones", 2*batch*rounds, now.Ingress.Fast-before.Ingress.Fast, now.Egress.Fast-before.Egress.Fast, spoilt)
}

// to and from are packets of another flow, without an answer and a service. No broken packet is one.
const otherPort = nearPort ^ 0x55d // 9845

func (s shape) to(port uint16, payload []byte) []byte {
	p := s.received(payload)
	put16(p[s.innerL4()+2:], port)
	s.sum(p)
	return p
}

func (s shape) from(port uint16, payload []byte) []byte {
	s.service = false
	p := s.sent(payload)
	put16(p[14+ipLen(s.inner6):], port)
	sumInner(p[14:], s.inner6)
	return p
}

// alike removes the differences between two sendings of a packet: id and source port, and the
// checksums, if they are right.
func (s shape) alike(list [][]byte) [][]byte {
	for _, b := range list {
		if len(b) < 64 || b[12] != 8 || b[13] != 0 || b[23] != 17 || binary.BigEndian.Uint16(b[36:]) != s.port() {
			continue
		}
		// A packet with a wrong checksum inside may get one outside as well.
		begun := folded(b[26:34], 17+uint32(len(b)-34)) // the device continues this sum
		if l4Sum(b[14:], false, 20, 17) == 0xffff || binary.BigEndian.Uint16(b[40:]) == begun || wrongSum(b[50:], s.inner6) {
			copy(b[40:], []byte{0, 0})
		}
		copy(b[18:], []byte{0, 0})
		copy(b[24:], []byte{0, 0})
		copy(b[34:], []byte{0, 0})
	}
	return list
}

// wrongSum reports whether an inner frame's transport has a wrong checksum.
func wrongSum(f []byte, v6 bool) bool {
	if len(f) < 14+ipLen(v6)+8 {
		return false
	}
	return l4Sum(f[14:], v6, ipLen(v6), 17) != 0xffff
}
