package account

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

// ARP, and packets for the host, are the system's and nobody else's.
func TestSystem(t *testing.T) {
	f := newFabric(t)
	box := f.add("box", 2, f.host)
	f.load(f.wire, 1, "udp-send", "--to", "10.66.0.254:9000", "--rate", "10000")
	stop := make(chan struct{})
	done := make(chan error, 1)
	index := f.device(f.wire, "wire", false).Ifindex
	go func() {
		done <- f.ns(f.wire).Do(func() error { return askForNobody(index, stop) })
	}()
	f.measure(while, func(d delta) {
		d.addsUp()
		mostly(d.t, "the system", d.system(), d.here(), 0.75)
		// A broadcast reaches it, too: nothing else is its own.
		if a := d.of(box); a.CPU()-a.Receive[Other].CPU > d.here()/50 {
			d.t.Errorf("the container is charged %+v", a)
		}
		if d.accounts[System].Receive[Other].Packets < 100 {
			d.t.Errorf("system %+v", d.accounts[System])
		}
	})
	close(stop)
	must(t, <-done)
}

// askForNobody broadcasts ARP requests until stop is closed.
func askForNobody(index int, stop <-chan struct{}) error {
	const arp = 0x0608 // ETH_P_ARP in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrLinklayer{Protocol: arp, Ifindex: index, Halen: 6}
	copy(to.Addr[:], "\xff\xff\xff\xff\xff\xff")
	request := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 10, 66, 0, 1, 0, 0, 0, 0, 0, 0, 10, 66, 0, 99}
	for {
		select {
		case <-stop:
			return nil
		case <-time.After(time.Millisecond):
		}
		if err := unix.Sendto(fd, request, 0, to); err != nil {
			return err
		}
	}
}

// Packets that are broken are the system's as long as nobody's device has taken
// them: a router drops what has a bad header. A bridge and a router pass on what is
// for a port whose checksum only the container looks at, and so does the bridge with
// all that has the container's address: whose device that is pays.
func TestBroken(t *testing.T) {
	for _, c := range []struct {
		name       string
		routed     bool
		badIP      bool
		containers bool // who pays
	}{
		{"ip routed", true, true, false},
		{"udp routed", true, false, true},
		{"ip bridged", false, true, true},
		{"udp bridged", false, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t)
			box := f.add("box", 2, f.host)
			// Where br_netfilter has the bridge ask the firewall, that drops what has a bad
			// header: then it is the system's.
			if err := f.host.Sysctl("bridge/bridge-nf-call-iptables", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			must(t, f.host.Sysctl("ipv4/ip_forward", "1"))
			to, mac := f.host, f.mac(f.host, "br0")
			if !c.routed {
				to, mac = box, f.mac(box, "eth0")
			}
			f.load(box, 0, "udp-recv", "--listen", ":9000")
			packet := broken(c.badIP)
			index := f.device(f.wire, "wire", false).Ifindex
			fd, err := rawSocket(f.wire)
			must(t, err)
			t.Cleanup(func() { unix.Close(fd) })                                      // after the flood that uses it
			at := &unix.SockaddrLinklayer{Protocol: 0x0008, Ifindex: index, Halen: 6} // ETH_P_IP in network order
			copy(at.Addr[:], mac)
			f.flooding(f.wire, func() error {
				for range 20 {
					if err := unix.Sendto(fd, packet, 0, at); err != nil {
						return err
					}
				}
				return nil
			})
			f.measure(while, func(d delta) {
				d.addsUp()
				if c.containers {
					mostly(d.t, "the container", d.of(box).CPU(), d.here(), 0.75)
					return
				}
				mostly(d.t, "the system", d.system(), d.here(), 0.75)
				if cpu := d.of(box).CPU(); cpu > d.here()/50 {
					d.t.Errorf("the container is charged %v", cpu)
				}
			})
			found := counter(t, box, "snmp", "Udp:", "InCsumErrors")
			if c.badIP {
				found = counter(t, to, "netstat", "IpExt:", "InCsumErrors")
			}
			if found < 1000 {
				t.Errorf("%d packets were found broken", found)
			}
		})
	}
}

// broken is a datagram for a container's port, with one of its checksums wrong.
func broken(badIP bool) []byte {
	p := make([]byte, 20+8+64)
	copy(p, []byte{0x45, 0, 0, byte(len(p)), 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 66, 0, 1, 10, 66, 0, 2})
	binary.BigEndian.PutUint16(p[20:], 9001)
	binary.BigEndian.PutUint16(p[22:], 9000)
	binary.BigEndian.PutUint16(p[24:], uint16(len(p)-20))
	if !badIP { // and of UDP the wrong one; 0 is none, which is right
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

func rawSocket(b *sandbox.Box) (fd int, err error) {
	err = b.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// counter is one of /proc/net's, which has a line of names and one of values.
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
	links, err := l.ns(b).Links(netdev.MostLinks)
	must(l.t, err)
	for _, k := range links {
		if k.Name == name {
			mac, err := net.ParseMAC(k.MAC)
			must(l.t, err)
			return mac
		}
	}
	l.t.Fatalf("no device %s in %s", name, b.Name)
	return nil
}
