package drop

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// frame builds an Ethernet frame to a container with an IP header to the given address, or with an
// address that no container has.
func frame(to string) []byte {
	b := make([]byte, 14, 64)
	copy(b, guestMAC())
	addr, err := netip.ParseAddr(to)
	switch {
	case err != nil:
		binary.BigEndian.PutUint16(b[12:], 0x0806) // ARP
		return append(b, make([]byte, 28)...)
	case addr.Is4():
		binary.BigEndian.PutUint16(b[12:], 0x0800)
		ip := make([]byte, 20)
		ip[0] = 0x45
		d := addr.As4()
		copy(ip[16:], d[:])
		return append(b, ip...)
	default:
		binary.BigEndian.PutUint16(b[12:], 0x86dd)
		ip := make([]byte, 40)
		ip[0] = 0x60
		d := addr.As16()
		copy(ip[24:], d[:])
		return append(b, ip...)
	}
}

// tcx verdicts, enum tcx_action_base.
const (
	tcxNext = ^uint32(0)
	tcxDrop = 2
)

// XDP verdicts, enum xdp_action.
const (
	xdpDrop = 1
	xdpPass = 2
)

// guestMAC is the default address of a container's device.
func guestMAC() net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, 0xaa} }

func hardware(t *testing.T, mac string) net.HardwareAddr {
	t.Helper()
	m, err := net.ParseMAC(mac)
	must(t, err)
	return m
}

// lo is the address of the device that test runs receive frames at.
const lo = "00:00:00:00:00:00"

func load(t testing.TB) *Dropper {
	t.Helper()
	testkit.NeedRoot(t)
	j := testkit.Journal(t, journal.Open)
	who := testkit.Opened(identity.Open("/proc"))(t)
	find := netdev.NewFinder("/proc", time.Now)
	e, err := Load(Config{Feature: "netcpu", Identity: who, Ends: hook.Open("/proc", j), Find: find, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// loaded returns a Dropper with a tenant that has the address 10.0.0.1, the program at the tenant's
// veth, and that of an uplink's driver.
func loaded(t *testing.T) (e *Dropper, w *Drops, counter, driver *ebpf.Program) {
	t.Helper()
	e = load(t)
	w = added(t, e)
	counter, driver = count(t, e, w), native(t, e, lo)
	run(t, counter, frame("10.0.0.1"), 1)
	return e, w, counter, driver
}

// another is a tenant that does not exist yet.
func another(e *Dropper) tenant.Key {
	return tenant.Key{NetNS: uint64(1 + e.counted)}
}

// added adds another tenant.
func added(t *testing.T, e *Dropper) *Drops {
	t.Helper()
	w, err := e.add(another(e), 1)
	must(t, err)
	return w
}

// count returns the program at a veth of a tenant with the address of frame's frames.
func count(t *testing.T, e *Dropper, w *Drops) *ebpf.Program {
	t.Helper()
	return countAt(t, e, w, uint64(w.Slot), guestMAC())
}

// countAt returns the program at the device that test runs receive frames at, as if it were the host end
// of a tenant's veth in a namespace.
func countAt(t *testing.T, e *Dropper, w *Drops, netns uint64, mac net.HardwareAddr) *ebpf.Program {
	t.Helper()
	end := container.Device{NetNS: netns, Index: 1}
	c, err := e.counter(end)
	must(t, err)
	must(t, e.tell(c, end, dropVeth{Slot: w.Slot, Mac: [6]byte(mac)}))
	t.Cleanup(func() { must(t, e.tell(c, end, dropVeth{})) })
	return c.Program
}

// run returns the verdict on a frame in tcx's terms, also that of XDP; 0 for any other.
func run(t *testing.T, p *ebpf.Program, data []byte, repeat uint32) uint32 {
	t.Helper()
	var verdict uint32
	for range repeat {
		v, err := p.Run(&ebpf.RunOptions{Data: data})
		must(t, err)
		verdict = v
	}
	if p.Type() == ebpf.XDP {
		return map[uint32]uint32{xdpDrop: tcxDrop, xdpPass: tcxNext}[verdict]
	}
	return verdict
}

// host is a namespace that routes packets to addresses, each to a device on its link that has the
// address behind it.
type host struct{ ns *testkit.NS }

func routes(t *testing.T, to map[string]string) host {
	t.Helper()
	h := host{testkit.NetNS(t)}
	testkit.Veth(t, h.ns, "br0", testkit.NetNS(t), "far")
	n := h.ns.Handle(t)
	br, err := n.LinkByName("br0")
	must(t, err)
	var errs []error
	h.ns.Address(t, "br0", "10.0.0.254/24")
	h.ns.Address(t, "br0", "fd00::254/64")
	for addr, mac := range to {
		errs = append(errs, n.NeighAdd(&netlink.Neigh{
			LinkIndex: br.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(addr), HardwareAddr: hardware(t, mac)}))
	}
	errs = append(errs, h.ns.Do(func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	}))
	must(t, errors.Join(errs...))
	return h
}

// sends lets a program at a veth's end in that namespace see a frame.
func (h host) sends(t *testing.T, p *ebpf.Program, f []byte) {
	t.Helper()
	must(t, h.ns.Do(func() error {
		_, err := p.Run(&ebpf.RunOptions{Data: f})
		return err
	}))
}

// The life of an address: it is learnt from packets into a veth, dropped while the ring is full,
// and let through once in a while and after a poll.
func TestEarlyDrop(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	one := added(t, e)
	two := added(t, e)
	if one.Slot == two.Slot {
		t.Fatalf("both tenants got slot %d", one.Slot)
	}
	for _, to := range []string{"10.0.0.1", "fd00::1"} {
		if v := run(t, e.tc, frame(to), 1); v != tcxNext {
			t.Errorf("to %s, not learnt: verdict %d, want next", to, v)
		}
	}
	if v := run(t, count(t, e, one), frame("10.0.0.1"), ring); v != tcxNext {
		t.Errorf("count: verdict %d, want next", v)
	}
	run(t, count(t, e, one), frame("fd00::1"), 1)
	run(t, count(t, e, two), frame("10.0.0.2"), ring-1)

	for _, c := range []struct {
		to   string
		want uint32
	}{
		{"10.0.0.1", tcxNext}, // the packet that passes each millisecond
		{"10.0.0.1", tcxDrop},
		{"fd00::1", tcxDrop},
		{"10.0.0.2", tcxNext}, // room for one more in its ring
		{"10.0.0.3", tcxNext}, // Nobody's
		{"::ffff:10.0.0.9", tcxNext},
		{"arp", tcxNext},
	} {
		must(t, one.change(func(e *dropTenant) { e.Retried = map[uint32]uint64{tcxDrop: ahead}[c.want] }))
		seen(t, e)
		if v := run(t, e.tc, frame(c.to), 1); v != c.want {
			t.Errorf("to %s: verdict %d, want %d", c.to, v, c.want)
		}
	}
	c, err := one.read()
	must(t, err)
	if c.Sent != ring+1 || c.Dropped != 2 {
		t.Errorf("counters %+v, want %d sent and 2 dropped", c, ring+1)
	}
	c.Polled = c.Sent
	must(t, e.maps.FlTenants.Put(one.Slot, c))
	if v := run(t, e.tc, frame("10.0.0.1"), 1); v != tcxNext {
		t.Errorf("after the ring was emptied: verdict %d, want next", v)
	}

	// A recycled slot starts empty.
	if _, err := e.cfg.Identity.Take(one.key); err != nil { // another feature uses it
		t.Fatal(err)
	}
	must(t, one.close())
	three, err := e.add(one.key, 1)
	must(t, err)
	if got, err := three.read(); err != nil || three.Slot != one.Slot || got.Sent != 0 {
		t.Errorf("slot %d used again: %d with %+v, %v", one.Slot, three.Slot, got, err)
	}
}

// seen sets the time of every known address in the future: a slow machine may take longer than it
// is kept.
func seen(t *testing.T, e *Dropper) {
	t.Helper()
	var key dropFlAddress
	var o dropOwner
	known := make(map[dropFlAddress]dropOwner)
	for it := e.maps.FlAddresses.Iterate(); it.Next(&key, &o); {
		known[key] = o
	}
	for key, o := range known {
		o.Seen = ahead
		must(t, e.maps.FlAddresses.Put(key, o))
	}
}

// age has an IPv4 address last seen two seconds earlier.
func age(t *testing.T, e *Dropper, addr string) {
	t.Helper()
	key, o := dropFlAddress{Ip: netip.MustParseAddr(addr).As16()}, dropOwner{}
	must(t, e.maps.FlAddresses.Lookup(key, &o))
	o.Seen -= min(o.Seen, uint64(2*time.Second))
	must(t, e.maps.FlAddresses.Put(key, o))
}

// An address that another container takes over is no longer dropped for the first container.
func TestEarlyDropForgetsAddress(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	thief := added(t, e)
	run(t, count(t, e, thief), frame("10.0.0.1"), 300)
	must(t, thief.change(func(e *dropTenant) { e.Retried = ahead }))
	if v := run(t, e.tc, frame("10.0.0.1"), 1); v != tcxDrop {
		t.Fatalf("verdict %d, want drop", v)
	}
	age(t, e, "10.0.0.1")
	if v := run(t, e.tc, frame("10.0.0.1"), 1); v != tcxNext {
		t.Errorf("two seconds after it was last seen: verdict %d, want next", v)
	}
}

func openNS(t *testing.T, path string) *netdev.NS {
	t.Helper()
	ns := testkit.Opened(netdev.Open(path))(t)
	return ns
}

// Neither a container's claims about itself nor a bridge's flooding causes drops of others'
// packets.
func TestEarlyDropForged(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	at := func(w *Drops, mac string) *ebpf.Program { return countAt(t, e, w, uint64(w.Slot), hardware(t, mac)) }
	to := func(mac, addr string) []byte {
		f := frame(addr)
		copy(f, hardware(t, mac))
		return f
	}
	const bad, good, host = "02:00:00:00:00:01", "02:00:00:00:00:02", lo
	driver := native(t, e, host)
	expect := func(what string, f []byte, want uint32) {
		t.Helper()
		for at, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver} {
			if v := run(t, p, f, 3); v != want {
				t.Errorf("%s, at the %s: verdict %d, want %d", what, at, v, want)
			}
		}
	}
	// A tenant that has used up its limit.
	thief := added(t, e)
	thiefs := at(thief, bad)
	limit := func(last time.Duration) {
		t.Helper()
		limited(t, thief, 7, -1, last)
	}
	h := routes(t, map[string]string{"10.0.0.1": bad, "10.0.0.3": good, "fd00::1": bad, "fd00::3": good, "10.0.0.4": bad, "10.0.0.5": bad})
	for _, addr := range []string{"10.0.0.1", "fd00::1"} {
		h.sends(t, thiefs, to(bad, addr))
	}
	run(t, thiefs, to(good, "10.0.0.2"), 1) // flooded by the bridge, or attracted by frames with good's address
	for _, addr := range []string{"10.0.0.3", "fd00::3", "10.0.0.6", "10.1.0.1"} {
		h.sends(t, thiefs, to(bad, addr)) // by forged ARP, or by an accomplice on the bridge
	}
	limit(time.Hour)
	expect("its own", to(bad, "10.0.0.1"), tcxDrop)
	expect("its own, routed by the host", to(host, "10.0.0.1"), tcxDrop)
	expect("its own, IPv6", to(host, "fd00::1"), tcxDrop)
	expect("another's that was flooded", to(good, "10.0.0.2"), tcxNext)
	expect("another's that was flooded, routed", to(host, "10.0.0.2"), tcxNext)
	expect("another's, as soon as it is sent to him again", to(good, "10.0.0.3"), tcxNext)
	for _, addr := range []string{"10.0.0.3", "fd00::3", "10.0.0.6", "10.1.0.1"} {
		expect("another's, routed by the host: "+addr, to(host, addr), tcxNext)
	}

	// An address with packets to two tenants is dropped for neither, from either side.
	limit(-time.Second)
	victim := at(added(t, e), good)
	for _, first := range []struct {
		p    *ebpf.Program
		mac  string
		then *ebpf.Program
		mac2 string
		addr string
	}{{thiefs, bad, victim, good, "10.0.0.4"}, {victim, good, thiefs, bad, "10.0.0.5"}} {
		limit(-time.Second)
		h.sends(t, first.p, to(first.mac, first.addr))
		h.sends(t, first.then, to(first.mac2, first.addr))
		limit(time.Hour)
		for _, mac := range []string{bad, good, host} {
			expect("contested "+first.addr+" by "+mac, to(mac, first.addr), tcxNext)
		}
	}

	// Once the first has got no packets for it for a while, it is the second's.
	age(t, e, "10.0.0.5")
	limit(-time.Second)
	h.sends(t, thiefs, to(bad, "10.0.0.5"))
	limit(time.Hour)
	expect("taken over", to(bad, "10.0.0.5"), tcxDrop)
	expect("taken over, routed", to(host, "10.0.0.5"), tcxDrop)
}
