package account

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// ARP, and packets for the host, are the system's and no container's.
func TestSystem(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box := f.add("box", 2)
	victim := f.victim()
	r := f.datagrams(f.wire, f.host, 0, "10.66.0.254:9000")
	f.expect(func(d delta) {
		// The box also receives the bridge's broadcast questions for the address of the wire.
		a := d.of(box)
		a.Receive[Other] = Work{}
		a.Own, a.Took = 0, 0
		if a != (Account{}) {
			d.t.Errorf("the container is charged %+v", a)
		}
		d.nothing(victim)
	})
	// The victim may not have computed while these came, beside others on its CPU.
	theft := Pair{Party{f.ids[victim], Task}, System}
	for n := uint64(2); f.between(f.began, f.read()).thefts[theft] <= 0; n++ {
		if n > 200 {
			t.Fatal("the system took nothing from who computes where its packets come")
		}
		f.send(f.wire, 1, packets, "udp-send", "10.66.0.254:9000")
		f.got(r, n*packets)
	}
	before := f.between(f.began, f.read()).of(box).Receive[Other].Packets
	request := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 10, 66, 0, 1, 0, 0, 0, 0, 0, 0, 10, 66, 0, 99}
	f.sends(0x0608, net.HardwareAddr("\xff\xff\xff\xff\xff\xff"), request) // ETH_P_ARP: for no container
	f.expect(func(d delta) {
		if n := d.of(box).Receive[Other].Packets - before; n < packets {
			d.t.Errorf("%d of %d requests by ARP have come", n, packets)
		}
		if w := d.of(box).Receive[UDP]; w != (Work{}) {
			d.t.Errorf("the container is charged %+v", w)
		}
	})
}

// sends sends a packet from the wire to a device, as often as a test does. protocol is in network
// order.
func (f *fabric) sends(protocol uint16, to net.HardwareAddr, packet []byte) {
	f.t.Helper()
	at := &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: f.Index(f.wire, "wire"), Halen: 6}
	copy(at.Addr[:], to)
	must(f.t, f.wire.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for range packets {
			if err := unix.Sendto(fd, packet, 0, at); err != nil {
				return err
			}
			time.Sleep(time.Millisecond) // no queue overflows
		}
		return nil
	}))
}

// Broken packets are the system's until a container's device takes them: a router drops a packet
// with a bad header. A bridge and a router forward a packet with a bad transport checksum, which
// only the container checks, and a bridge forwards every frame to the container's address: the
// owner of that device pays.
func TestBroken(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	box := f.add("box", 2)
	must(t, f.host.Sysctl("ipv4/ip_forward", "1"))
	f.receive(box, 0, ":9000")
	for _, c := range []struct {
		name       string
		routed     bool
		badIP      bool
		containers bool // containers pay, not System
	}{
		{"ip routed", true, true, false},
		{"udp routed", true, false, true},
		{"ip bridged", false, true, true},
		{"udp bridged", false, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.begin(t)
			to, mac := f.host, f.mac(f.host, "br0")
			if !c.routed {
				to, mac = box, f.mac(box, "eth0")
			}
			found := func() uint64 {
				if c.badIP {
					return counter(t, to, "netstat", "IpExt:", "InCsumErrors")
				}
				return counter(t, box, "snmp", "Udp:", "InCsumErrors")
			}
			was, packet := found(), broken(c.badIP)
			f.sends(0x0008, mac, packet) // ETH_P_IP
			f.await(func() string {
				if n := found() - was; n != packets {
					return fmt.Sprintf("%d of %d packets were found broken", n, packets)
				}
				return ""
			})
			f.expect(func(d delta) {
				if c.containers {
					d.received(box, UDP, packets, packets*uint64(len(packet)))
					return
				}
				if w := d.of(box).Receive[UDP]; w != (Work{}) || d.system().CPU() <= 0 {
					d.t.Errorf("the container is charged %+v, the system %v", w, d.system().CPU())
				}
			})
		})
	}
}

// broken returns a datagram for a container's port, with one of its checksums wrong.
func broken(badIP bool) []byte {
	p := make([]byte, 20+8+64)
	copy(p, []byte{0x45, 0, 0, byte(len(p)), 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 66, 0, 1, 10, 66, 0, 2})
	binary.BigEndian.PutUint16(p[20:], 9001)
	binary.BigEndian.PutUint16(p[22:], 9000)
	binary.BigEndian.PutUint16(p[24:], uint16(len(p)-20))
	if !badIP { // UDP's checksum is wrong instead; 0 would mean none, which is valid
		p[26] = 0xba
		var sum uint32
		for i := 0; i < 20; i += 2 {
			sum += uint32(binary.BigEndian.Uint16(p[i:]))
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		binary.BigEndian.PutUint16(p[10:], ^uint16(sum))
	}
	return p
}

// counter returns a counter of a /proc/net file with a line of names and one of values.
func counter(t *testing.T, b *sandbox.Box, file, row, name string) uint64 {
	t.Helper()
	all, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", b.PID, file))
	must(t, err)
	var names []string
	for line := range strings.Lines(string(all)) {
		fields := strings.Fields(line)
		if fields[0] != row {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		if i := slices.Index(names, name); i > 0 {
			n, err := strconv.ParseUint(fields[i], 10, 64)
			must(t, err)
			return n
		}
	}
	t.Fatalf("no %s of %s in %s", name, row, file)
	return 0
}

func (l *lab) mac(b *sandbox.Box, name string) net.HardwareAddr {
	l.t.Helper()
	var mac net.HardwareAddr
	l.Change(b, name, func(_ *netlink.Handle, k netlink.Link) error {
		mac = k.Attrs().HardwareAddr
		return nil
	})
	return mac
}
