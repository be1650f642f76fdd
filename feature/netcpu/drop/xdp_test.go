package drop

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func native(t *testing.T, e *Dropper, mac string) *ebpf.Program {
	t.Helper()
	p, err := e.native(mac)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// tagged puts VLAN tags in front of a frame's payload, the first outermost.
func tagged(f []byte, types ...uint16) []byte {
	f = slices.Clone(f)
	for _, typ := range slices.Backward(types) {
		tag := binary.BigEndian.AppendUint16(nil, typ)
		f = slices.Insert(f, 12, append(tag, 0, 10)...)
	}
	return f
}

func with(f []byte, at int, b ...byte) []byte {
	f = slices.Clone(f)
	copy(f[at:], b)
	return f
}

// The program in the driver decides like the tc program of the same uplink, for any frame that both
// can get: with a container without allowance, and frames for all others.
func TestDriverDecides(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	const own, other, uplink, tunnel = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:09", "02:00:00:00:00:08"
	w := added(t, e)
	to := func(mac, ip string) []byte { return with(frame(ip), 0, hardware(t, mac)...) }
	counter := countAt(t, e, w, 0, hardware(t, own))
	h := routes(t, map[string]string{"10.0.0.1": own, "fd00::1": own})
	for _, ip := range []string{"10.0.0.1", "fd00::1"} {
		h.sends(t, counter, to(own, ip))
	}
	seen(t, e)
	drop := native(t, e, uplink)

	udp4 := with(append(to(own, "10.0.0.1"), make([]byte, 64)...), 14+9, 17)
	ext := func(next byte) []byte { return with(append(to(own, "fd00::1"), make([]byte, 64)...), 14+6, next) }
	// A tunnel that has gone, a tunnel that stays, and a device that is no tunnel.
	for _, first := range []string{other, tunnel} {
		must(t, e.holdTunnels([]netdev.Link{{Kind: "vxlan", MAC: first}, {Kind: "veth", MAC: uplink}}))
	}
	in := func(outer []byte, port uint16, header, inner []byte) []byte {
		if outer[12] == 0x08 {
			outer = with(outer, 14+9, unix.IPPROTO_UDP)
		} else {
			outer = with(outer, 14+6, unix.IPPROTO_UDP)
		}
		udp := binary.BigEndian.AppendUint16([]byte{0, 99}, port)
		return slices.Concat(outer, udp, make([]byte, 4), header, inner)
	}
	node, node6 := to(uplink, "192.0.2.1"), to(uplink, "fd01::1")
	vxlan, geneve := []byte{8, 0, 0, 0, 0, 0, 7, 0}, []byte{0, 0, 0x65, 0x58, 0, 0, 7, 0}
	options := append([]byte{2, 0, 0x65, 0x58, 0, 0, 7, 0}, make([]byte, 8)...)
	overlay := in(node, 4789, vxlan, to(own, "10.0.0.1"))
	cases := []struct {
		name string
		data []byte
		want uint32 // of a container without allowance
	}{
		{"IPv4, bridged", to(own, "10.0.0.1"), tcxDrop},
		{"IPv4, routed by the host", to(uplink, "10.0.0.1"), tcxDrop},
		{"IPv6, bridged", to(own, "fd00::1"), tcxDrop},
		{"IPv6, routed", to(uplink, "fd00::1"), tcxDrop},
		{"a UDP datagram", udp4, tcxDrop},
		{"a first fragment", with(udp4, 14+6, 0x20, 0), tcxDrop},
		{"a later fragment, without ports", with(udp4, 14+6, 0x20, 185), tcxDrop},
		{"the last fragment", with(udp4, 14+6, 0, 185), tcxDrop},
		{"IPv6 with hop-by-hop options", ext(0), tcxDrop},
		{"an IPv6 fragment", ext(44), tcxDrop},
		{"IPv6 with destination options", ext(60), tcxDrop},
		{"in a VLAN", tagged(udp4, 0x8100), tcxDrop},
		{"in a service VLAN", tagged(udp4, 0x88a8), tcxDrop},
		{"IPv6 in a VLAN", tagged(ext(17), 0x8100), tcxDrop},

		{"of another container", to(other, "10.0.0.2"), tcxNext},
		{"of another container, routed", to(uplink, "10.0.0.2"), tcxNext},
		{"its address at another device", to(other, "10.0.0.1"), tcxNext},
		{"a published port, before NAT", to(uplink, "192.0.2.1"), tcxNext},
		{"for it, in VXLAN", overlay, tcxDrop},
		{"by IPv6, in VXLAN on its old port", in(node, 8472, vxlan, to(own, "fd00::1")), tcxDrop},
		{"in VXLAN by IPv6", in(node6, 4789, vxlan, to(own, "10.0.0.1")), tcxDrop},
		{"in VXLAN in a VLAN", tagged(overlay, 0x8100), tcxDrop},
		{"in Geneve", in(node, 6081, geneve, to(own, "10.0.0.1")), tcxDrop},
		{"in Geneve with options", in(node6, 6081, options, to(own, "10.0.0.1")), tcxDrop},
		{"in VXLAN, routed by the host", in(node, 4789, vxlan, to(tunnel, "10.0.0.1")), tcxDrop},

		{"in VXLAN, routed by another", in(node, 4789, vxlan, to(other, "10.0.0.1")), tcxNext},
		{"in VXLAN, of another container", in(node, 4789, vxlan, to(other, "10.0.0.2")), tcxNext},
		{"in VXLAN for another host", in(to(other, "192.0.2.1"), 4789, vxlan, to(own, "10.0.0.1")), tcxNext},
		{"in VXLAN, broadcast", in(node, 4789, vxlan, to("ff:ff:ff:ff:ff:ff", "10.0.0.1")), tcxNext},
		{"in VXLAN, a fragment", with(overlay, 14+6, 0x20, 0), tcxNext},
		{"in VXLAN behind IP options", with(overlay, 14, 0x46), tcxNext},
		{"in VXLAN by TCP", with(overlay, 14+9, unix.IPPROTO_TCP), tcxNext},
		{"in VXLAN, cut in its header", overlay[:14+20+8+7], tcxNext},
		{"in VXLAN, cut in the inner frame", overlay[:len(overlay)-1], tcxNext},
		{"in VXLAN behind IPv6 options", with(in(node6, 4789, vxlan, to(own, "10.0.0.1")), 14+6, 0), tcxNext},
		{"in Geneve without Ethernet", with(in(node, 6081, geneve, to(own, "10.0.0.1")), 14+20+8+2, 8, 0), tcxNext},
		{"in Geneve whose options end behind it", with(in(node, 6081, geneve, to(own, "10.0.0.1")), 14+20+8, 0x3f), tcxNext},
		{"on a port of no tunnel", in(node, 4790, vxlan, to(own, "10.0.0.1")), tcxNext},
		{"in two VLANs", tagged(udp4, 0x88a8, 0x8100), tcxNext},
		{"in a VLAN, cut behind the tag", tagged(udp4, 0x8100)[:18], tcxNext},
		{"in a VLAN, cut in the tag", tagged(udp4, 0x8100)[:16], tcxNext},
		{"ARP", to(own, "arp"), tcxNext},
		{"broadcast", to("ff:ff:ff:ff:ff:ff", "10.0.0.1"), tcxNext},
		{"multicast", to("01:00:5e:00:00:01", "10.0.0.1"), tcxNext},
		{"an Ethernet header and no more", to(own, "10.0.0.1")[:14], tcxNext},
		{"IPv4, cut in the header", to(own, "10.0.0.1")[:14+19], tcxNext},
		{"IPv6, cut in the header", to(own, "fd00::1")[:14+39], tcxNext},
		{"an 802.3 length", with(udp4, 12, 0, 46), tcxNext},
		{"mapped form of its address, by IPv6", with(to(own, "fd00::1"), 14+24, netip.MustParseAddr("::ffff:10.0.0.1").AsSlice()...), tcxNext},
	}
	state := func(spent bool) {
		t.Helper()
		last := -time.Second
		if spent {
			last = time.Hour
		}
		limited(t, w, 7, -1, last)
	}
	count := func() uint64 {
		c, err := w.read()
		must(t, err)
		return c.Beyond
	}
	for _, c := range cases {
		state(false)
		if v := run(t, drop, c.data, 2); v != tcxNext {
			t.Errorf("%s, with Nobody to drop: verdict %d, want next", c.name, v)
		}
		state(true)
		before := count()
		if v := run(t, drop, c.data, 2); v != c.want {
			t.Errorf("%s: verdict %d, want %d", c.name, v, c.want)
		}
		if n, dropped := count()-before, c.want == tcxDrop; (n == 2) != dropped || (n == 0) == dropped {
			t.Errorf("%s: %d counted", c.name, n)
		}
	}
	// A drop for the slot Nobody reaches no account.
	if last := fates(t, e); len(last) != 0 {
		t.Errorf("told of the last packet: %v", last)
	}
	// The accounts see, and so can charge, the skb of a packet that tc drops.
	if v, err := e.tc.Run(&ebpf.RunOptions{Data: udp4}); err != nil || v != tcxDrop {
		t.Errorf("tc's verdict %d, %v", v, err)
	}
	if last := fates(t, e); !slices.Equal(last, []dropFlFate{{Tenant: uint16(w.Slot), Fate: 1}}) {
		t.Errorf("told of the last packet that tc dropped: %v, want slot %d", last, w.Slot)
	}
}

// fates returns the recorded fate of the last packet of each CPU, if any.
func fates(t *testing.T, e *Dropper) []dropFlFate {
	t.Helper()
	var all []dropFlFate
	must(t, e.maps.FlFates.Lookup(uint32(0), &all))
	return slices.DeleteFunc(all, func(f dropFlFate) bool { return f.Fate == 0 })
}

// Both programs of an uplink agree on any frame, however broken.
func TestDriverAgrees(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w := added(t, e)
	counter := count(t, e, w)
	carrier := with(with(append(frame("192.0.2.1"), make([]byte, 16)...), 0, hardware(t, lo)...), 14+9, unix.IPPROTO_UDP)
	heads := [][]byte{frame("10.0.0.1"), frame("fd00::1"), frame("10.0.0.2"), frame("arp"),
		append(with(carrier, 14+20+2, 0x12, 0xb5), frame("10.0.0.1")...),                              // 4789
		append(with(carrier, 14+20+2, 0x17, 0xc1, 0, 0, 0, 0, 0, 0, 0x65, 0x58), frame("fd00::1")...)} // 6081
	for _, f := range heads[:2] {
		run(t, counter, f, 1)
	}
	seen(t, e)
	limited(t, w, 7, -1, time.Hour)
	drop := native(t, e, lo) // where both run
	random := rand.New(rand.NewPCG(1, 2))
	verdicts := make(map[uint32]int)
	for range 4000 {
		f := append(slices.Clone(heads[random.IntN(len(heads))]), make([]byte, random.IntN(80))...)
		for range random.IntN(4) {
			f[random.IntN(len(f))] = byte(random.Uint32())
		}
		f = f[:14+random.IntN(len(f)-13)]
		if t := binary.BigEndian.Uint16(f[12:]); t == 0x8100 || t == 0x88a8 {
			continue // the kernel takes a tag off before tc, but not in a test run
		}
		x := run(t, drop, f, 1)
		v, err := e.tc.Run(&ebpf.RunOptions{Data: f})
		if errors.Is(err, unix.EINVAL) {
			v, err = tcxNext, nil // the kernel makes no skb with truncated headers
		}
		must(t, err)
		if v != x || v != tcxDrop && v != tcxNext {
			t.Fatalf("frame %x: tc says %d, XDP %d", f, v, x)
		}
		verdicts[x]++
	}
	if verdicts[tcxDrop] < 100 || verdicts[tcxNext] < 100 {
		t.Errorf("of one verdict there is next to nothing: %v", verdicts)
	}
}

// An IPv6 packet to the mapped form of an IPv4 address does not assign that address to its
// receiver.
func TestMappedTeachesNothing(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w := added(t, e)
	mapped := with(frame("fd00::1"), 14+24, netip.MustParseAddr("::ffff:10.0.0.2").AsSlice()...)
	run(t, count(t, e, w), mapped, 1)
	var key dropFlAddress
	var o dropOwner
	for it := e.maps.FlAddresses.Iterate(); it.Next(&key, &o); {
		t.Errorf("learnt %x", key.Ip)
	}
}

// A program that stays in a driver drops nothing for a container that has gone, although its ring
// is no longer counted.
func TestDriverIdles(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w := added(t, e)
	drop := native(t, e, lo)
	run(t, count(t, e, w), frame("10.0.0.1"), 300)
	must(t, w.change(func(e *dropTenant) { e.Retried = ahead }))
	seen(t, e)
	if v := run(t, drop, frame("10.0.0.1"), 1); v != tcxDrop {
		t.Fatalf("verdict %d with a full ring", v)
	}
	must(t, w.close())
	must(t, w.change(func(e *dropTenant) { e.Retried = ahead }))
	seen(t, e)
	if v := run(t, drop, frame("10.0.0.1"), 1); v != tcxNext {
		t.Errorf("verdict %d once the container has gone", v)
	}
}

// A point keeps its program if that cannot be replaced, and reports that; one without its device is
// detected, whatever the address of the next.
func TestDriverHolds(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	h := routes(t, nil)
	n := h.ns.Handle(t)
	l, err := n.LinkByName("br0")
	must(t, err)
	number := l.Attrs().Index
	var ns *netdev.NS
	must(t, h.ns.Do(func() (err error) { ns, err = netdev.Open("/proc/thread-self/ns/net"); return err }))
	defer ns.Close()
	d := &point{name: "br0"}
	d.driver, err = e.attachXDP(ns, number)
	must(t, err)
	defer d.close()
	mac := d.driver.mac
	for _, c := range []struct {
		mac   string
		fails bool
	}{{mac, false}, {"", true}, {"02:00:00:00:00:77", false}, {mac, false}} {
		if err := e.hold(d, netdev.Link{Name: "br0", Index: number, MAC: c.mac}); err != nil || (d.why != "") != c.fails {
			t.Errorf("address %q: %v, why %q", c.mac, err, d.why)
		}
		info, err := d.driver.link.Info()
		if err != nil || int(info.XDP().Ifindex) != number {
			t.Errorf("address %q: the program is at %+v, %v", c.mac, info, err)
		}
	}
	must(t, n.LinkDel(l))
	for _, mac := range []string{mac, "02:00:00:00:00:77"} {
		if err := e.hold(d, netdev.Link{Name: "br0", Index: number, MAC: mac}); !errors.Is(err, journal.ErrGone) {
			t.Errorf("another device with the number, address %s: %v", mac, err)
		}
	}
}

// The list of points waits for no lock, and has a line for a name only if the host has no such
// point.
func TestPointsAreShown(t *testing.T) {
	d := &Dropper{cfg: Config{XDP: []string{"eth0", "eth1", "eth2"}}, points: map[container.Device]*point{
		{NetNS: 1, Index: 2}: {name: "eth0", host: true},
		{NetNS: 1, Index: 3}: {name: "eth1", host: true, driver: new(driver)},
		{NetNS: 7, Index: 2}: {name: "eth2"}, // of an overlay's
	}}
	d.show()
	got := d.Points()
	if len(got) != 4 || got[2].Why == "" {
		t.Fatalf("points %+v", got)
	}
	got[2].Why = ""
	want := []Point{{Netns: 1, Device: "eth0", By: ByTC}, {Netns: 1, Device: "eth1", By: ByXDP}, {Device: "eth2"}, {Netns: 7, Device: "eth2", By: ByTC}}
	if !slices.Equal(got, want) {
		t.Errorf("points %+v, want %+v", got, want)
	}
}
