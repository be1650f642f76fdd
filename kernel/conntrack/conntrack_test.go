package conntrack_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

func open(t *testing.T, kit *testkit.NS) *conntrack.Table {
	t.Helper()
	ns, err := netdev.Open(kit.Path)
	must(t, err)
	defer ns.Close()
	table, err := conntrack.Open(ns)
	if errors.Is(err, conntrack.ErrUnsupported) {
		testkit.Skip(t, err.Error())
	}
	must(t, err)
	t.Cleanup(table.Close)
	return table
}

func reverse(t conntrack.Tuple) conntrack.Tuple {
	return conntrack.Tuple{Source: t.Destination, Destination: t.Source}
}

// Connections are found by the tuple of either direction, and the flag is set in both.
func TestBeLiberal(t *testing.T) {
	testkit.OnKernels(t)
	kit := testkit.NetNS(t)
	table := open(t, kit)
	var tuples []conntrack.Tuple
	const each = 50
	for i := range each {
		for _, addrs := range [][2]string{{"192.0.2.1", "192.0.2.2"}, {"2001:db8::1", "2001:db8::2"}} {
			tuples = append(tuples, conntrack.Tuple{
				Source:      netip.AddrPortFrom(netip.MustParseAddr(addrs[0]), uint16(40000+i)),
				Destination: netip.AddrPortFrom(netip.MustParseAddr(addrs[1]), 80),
			})
		}
	}
	var asked []conntrack.Tuple
	for i, tuple := range tuples {
		if i%5 != 4 {
			must(t, kit.Do(func() error { return enter(tuple) }))
		}
		if i%3 == 1 {
			tuple = reverse(tuple)
		}
		asked = append(asked, tuple)
	}
	asked = append(asked, conntrack.Tuple{}, conntrack.Tuple{Source: tuples[0].Source, Destination: tuples[1].Destination})
	found, err := table.BeLiberal(asked)
	must(t, err)
	for i := range asked {
		there := i < len(tuples) && i%5 != 4
		if found[i] != there {
			t.Errorf("%v is found: %v, want %v", asked[i], found[i], there)
		}
		if !there {
			continue
		}
		if a, b := flags(t, kit, tuples[i]); a&8 == 0 || b&8 == 0 {
			t.Errorf("%v has the flags %#x and %#x", tuples[i], a, b)
		}
	}
}

// enter makes an entry of an established connection.
func enter(tuple conntrack.Tuple) error {
	family := unix.AF_INET
	if tuple.Source.Addr().Is6() {
		family = unix.AF_INET6
	}
	side := func(t conntrack.Tuple) netlink.IPTuple {
		return netlink.IPTuple{
			SrcIP: t.Source.Addr().AsSlice(), DstIP: t.Destination.Addr().AsSlice(),
			SrcPort: t.Source.Port(), DstPort: t.Destination.Port(), Protocol: unix.IPPROTO_TCP,
		}
	}
	return netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(family), &netlink.ConntrackFlow{
		FamilyType: uint8(family), Forward: side(tuple), Reverse: side(reverse(tuple)),
		TimeOut: 1000, ProtoInfo: &netlink.ProtoInfoTCP{State: nl.TCP_CONNTRACK_ESTABLISHED},
	})
}

// flags reads the flags of the original and of the reply direction.
func flags(t *testing.T, kit *testkit.NS, tuple conntrack.Tuple) (original, reply byte) {
	t.Helper()
	family := unix.AF_INET
	if tuple.Source.Addr().Is6() {
		family = unix.AF_INET6
	}
	var entries [][]byte
	must(t, kit.Do(func() (err error) {
		req := nl.NewNetlinkRequest(1<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(family)})
		entries, err = req.Execute(unix.NETLINK_NETFILTER, 0)
		return err
	}))
	port := nl.BEUint16Attr(tuple.Source.Port())
	for _, e := range entries {
		attrs := nest(t, e[nl.SizeofNfgenmsg:])
		proto := nest(t, nest(t, attrs[nl.CTA_TUPLE_ORIG])[nl.CTA_TUPLE_PROTO])
		if string(proto[nl.CTA_PROTO_SRC_PORT]) == string(port) {
			tcp := nest(t, nest(t, attrs[nl.CTA_PROTOINFO])[nl.CTA_PROTOINFO_TCP])
			if state := tcp[nl.CTA_PROTOINFO_TCP_STATE][0]; state != nl.TCP_CONNTRACK_ESTABLISHED {
				t.Errorf("%v is in state %d", tuple, state)
			}
			return tcp[nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL][0], tcp[nl.CTA_PROTOINFO_TCP_FLAGS_REPLY][0]
		}
	}
	t.Fatalf("no entry of %v", tuple)
	return 0, 0
}

func nest(t *testing.T, b []byte) map[int][]byte {
	t.Helper()
	attrs, err := nl.ParseRouteAttr(b)
	must(t, err)
	m := make(map[int][]byte)
	for _, a := range attrs {
		m[int(a.Attr.Type&nl.NLA_TYPE_MASK)] = a.Value
	}
	return m
}

// A segment far beyond the window is invalid, until the connection is made liberal.
func TestLiberalWindow(t *testing.T) {
	if _, err := exec.LookPath("iptables"); err != nil {
		testkit.Skip(t, "needs iptables")
	}
	kit := testkit.NetNS(t)
	table := open(t, kit)
	must(t, kit.Do(func() error {
		return exec.Command("iptables", "-A", "OUTPUT", "-m", "conntrack", "--ctstate", "INVALID", "-j", "ACCEPT").Run()
	}))
	var tuple conntrack.Tuple
	must(t, kit.Do(func() error {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		tuple = conntrack.Tuple{Source: netip.MustParseAddrPort(c.LocalAddr().String()), Destination: netip.MustParseAddrPort(c.RemoteAddr().String())}
		s, err := l.Accept()
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	}))
	strays := func(flags byte) {
		t.Helper()
		for part := range uint32(4) {
			must(t, errors.Join(stray(kit, tuple, part<<30, flags), stray(kit, reverse(tuple), part<<30, flags)))
		}
	}
	strays(0x10) // ACK
	before := invalid(t, kit)
	// Half of the number space is beyond the window, the other half counts as acknowledged.
	if before < 2 {
		t.Fatalf("%d of 8 packets are invalid", before)
	}
	if found, err := table.BeLiberal([]conntrack.Tuple{tuple}); err != nil || !found[0] {
		t.Fatalf("%v, %v", found, err)
	}
	strays(0x10)
	strays(0x04) // RST, long after what the table has seen
	testkit.Same(t, "packets that are invalid", before, invalid(t, kit))
}

func stray(kit *testkit.NS, tuple conntrack.Tuple, seq uint32, flags byte) error {
	return kit.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		b := make([]byte, 40)
		b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
		binary.BigEndian.PutUint16(b[2:], 40)
		copy(b[12:], tuple.Source.Addr().AsSlice())
		copy(b[16:], tuple.Destination.Addr().AsSlice())
		binary.BigEndian.PutUint16(b[20:], tuple.Source.Port())
		binary.BigEndian.PutUint16(b[22:], tuple.Destination.Port())
		binary.BigEndian.PutUint32(b[24:], seq)
		b[32], b[33] = 5<<4, flags
		// The TCP checksum is wrong: only connection tracking reads the segment.
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: tuple.Destination.Addr().As4()})
	})
}

func invalid(t *testing.T, kit *testkit.NS) int {
	t.Helper()
	var out []byte
	must(t, kit.Do(func() (err error) {
		out, err = exec.Command("iptables", "-vnxL", "OUTPUT").Output()
		return err
	}))
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	n, err := strconv.Atoi(strings.Fields(lines[len(lines)-1])[0])
	must(t, err)
	return n
}

// A namespace without a stateful rule tracks nothing; the sysctl is its own.
func TestLiberal(t *testing.T) {
	kit := testkit.NetNS(t)
	ns := testkit.Opened(netdev.Open(kit.Path))(t)
	if liberal, err := conntrack.Liberal(ns); err != nil || liberal {
		t.Fatal(liberal, err)
	}
	must(t, kit.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", []byte("1"), 0)
	}))
	if liberal, err := conntrack.Liberal(ns); err != nil || !liberal {
		t.Error(liberal, err)
	}
}
