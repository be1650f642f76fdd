package drop

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// A ring of packets may wait for a tenant with a used-up quota or limit: a request is answered
// late, and none is lost (Iron, section 3.2).
func TestEarlyDropWaits(t *testing.T) {
	testkit.OnKernels(t)
	e, w, counter, driver := loaded(t)
	seen(t, e)
	must(t, e.maps.FlCharges.Put(uint32(7), int64(0)))
	for name, spent := range map[string]dropTenant{
		"quota":                    {Stopped: ahead},
		"limit":                    {Account: 7, Limit: -1, Until: ahead},
		"limit, nothing in a ring": {Account: 7, Limit: -1, Until: ahead, NoRing: 1},
	} {
		spent.Retried, spent.Waits = ahead, ahead
		at := func(waiting uint64) dropTenant { spent.Waiting = waiting; return spent }
		for _, c := range []struct {
			when string
			dropTenant
			p       *ebpf.Program
			want    uint32
			waiting uint64
		}{
			{"the first", at(0), counter, tcxNext, 1},
			{"the last", at(ring - 1), counter, tcxNext, ring},
			{"one too many", at(ring), counter, tcxDrop, ring},
			// It passes the host end next, and is counted there.
			{"the first, at the uplink", at(0), e.tc, tcxNext, 0},
			{"the first, at the driver", at(0), driver, tcxNext, 0},
			{"one too many, at the uplink", at(ring), e.tc, tcxDrop, ring},
			{"one too many, at the driver", at(ring), driver, tcxDrop, ring},
		} {
			must(t, e.maps.FlTenants.Put(w.Slot, c.dropTenant))
			if v := run(t, c.p, frame("10.0.0.1"), 1); v != c.want {
				t.Errorf("%s, %s: verdict %d, want %d", name, c.when, v, c.want)
			}
			after, err := w.read()
			if err != nil || after.Waiting != c.waiting {
				t.Errorf("%s, %s: %d wait, want %d (%v)", name, c.when, after.Waiting, c.waiting, err)
			}
			if held := c.want == tcxDrop && c.p != counter; held != (after.Held == 1) || after.Held > after.Arrived {
				t.Errorf("%s, %s: %d of %d that arrived are held at an uplink", name, c.when, after.Held, after.Arrived)
			}
		}
		// A period later there is room again, whether or not a poll has come between.
		old := at(ring)
		old.Waits = 1
		must(t, e.maps.FlTenants.Put(w.Slot, old))
		if v := run(t, counter, frame("10.0.0.1"), 1); v != tcxNext {
			t.Errorf("%s, a period later: verdict %d, want next", name, v)
		}
	}
}

// ahead is ahead of the clock of any machine; ring is the size of a veth's.
const (
	ahead = uint64(100 * 365 * 24 * time.Hour)
	ring  = 256
)

// limited is limit for a tenant without room for waiting packets.
func limited(t *testing.T, w *Drops, account uint32, sum int64, lasts time.Duration) {
	t.Helper()
	must(t, w.limit(account, sum, lasts))
	must(t, w.change(func(e *dropTenant) { e.Waits, e.Waiting = ahead, ring }))
}

// A pace lets a ring of packets pass at once, and then one each gap, until it ends or is not
// renewed. It holds at the uplink, and not for what the host itself sends.
func TestPace(t *testing.T) {
	testkit.OnKernels(t)
	e, w, counter, driver := loaded(t)
	seen(t, e)
	const packets, perSecond = 2000, 100
	for name, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver} {
		// sends returns how many packets were dropped, and the most that the pace lets pass.
		sends := func() (dropped, pass uint64) {
			t.Helper()
			before, err := w.read()
			must(t, err)
			began := time.Now()
			run(t, p, frame("10.0.0.1"), packets)
			pass = ring + 1 + uint64(time.Since(began)*perSecond/time.Second)
			after, err := w.read()
			must(t, err)
			dropped = after.Dropped - before.Dropped
			if got := after.Arrived - before.Arrived; got != packets {
				t.Errorf("%s: %d packets arrived, want %d", name, got, packets)
			}
			if got := after.Beyond - before.Beyond; got != dropped {
				t.Errorf("%s: %d of %d dropped packets are beyond the limit, want all", name, got, dropped)
			}
			return dropped, pass
		}
		must(t, w.change(func(t *dropTenant) { t.Next = 0 }))
		must(t, w.Pace(perSecond, time.Hour))
		if dropped, pass := sends(); dropped > packets-ring || dropped < packets-pass {
			t.Errorf("%s: %d of %d packets were dropped, want %d to %d", name, dropped, packets, packets-pass, packets-ring)
		}
		if v := run(t, counter, frame("10.0.0.1"), 1); v != tcxNext {
			t.Errorf("at the host end: verdict %d, want next", v)
		}
		unowned, err := e.Others()
		must(t, err)
		run(t, p, frame("10.0.0.9"), packets)
		if now, err := e.Others(); err != nil || now-unowned != packets {
			t.Errorf("%s: %d packets for others arrived (%v), want %d", name, now-unowned, err, packets)
		}
		w.charged = true
		e.tenants = map[tenant.Key]*Drops{w.key: w}
		both, err := e.Others()
		must(t, err)
		run(t, p, frame("10.0.0.1"), packets)
		run(t, p, frame("10.0.0.9"), packets)
		if now, err := e.Others(); err != nil || now-both != 2*packets {
			t.Errorf("%s: %d packets for others arrived (%v), want %d with those of a charged one", name, now-both, err, 2*packets)
		}
		w.charged, e.tenants = false, nil
		must(t, w.Pace(perSecond, -time.Second))
		if dropped, _ := sends(); dropped > 0 {
			t.Errorf("%s: a pace that has lapsed dropped %d packets", name, dropped)
		}
		must(t, w.Pace(perSecond, time.Hour))
		must(t, w.Pace(0, time.Hour))
		if dropped, _ := sends(); dropped > 0 {
			t.Errorf("%s: without a pace %d packets were dropped", name, dropped)
		}
	}
}

// What may wait for a used-up quota is so much in a time, however short the quota's period: a poll in
// the next one renews nothing.
func TestCreditIsNoPeriods(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "h0", b, "eth0")
	a.Address(t, "h0", "10.0.0.254/24")
	inside, host := openNS(t, b.Path), openNS(t, a.Path)
	must(t, errors.Join(host.Offload(2, netdev.TSO).Write(netdev.Off), inside.Offload(2, netdev.GRO).Write(netdev.GRO.On())))
	own, err := inside.Link(2)
	must(t, err)
	far, err := a.Handle(t).LinkByName("h0")
	must(t, err)
	must(t, a.Handle(t).NeighAdd(&netlink.Neigh{LinkIndex: far.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IPv4(10, 0, 0, 1), HardwareAddr: hardware(t, own.MAC)}))
	w := added(t, e)
	must(t, e.maps.FlCounted.Put(dropFlDevice{Netns: uint32(inside.Inode()), Ifindex: 2}, w.Slot))
	must(t, w.change(func(e *dropTenant) { e.Stopped, e.Waits, e.Waiting = 1, ahead, ring }))
	testkit.Await(t, "a poll within the quota", func() bool {
		must(t, a.Do(func() error {
			c, err := net.Dial("udp", "10.0.0.1:9")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("x"))
			return err
		}))
		now, err := w.read()
		must(t, err)
		return now.Stopped == 0
	})
	if now, err := w.read(); err != nil || now.Waits != ahead || now.Waiting != ring {
		t.Errorf("%d may not wait any more since %d (%v)", now.Waiting, now.Waits, err)
	}
}

// A full map is an error for the caller, and changes nothing for others.
func TestEarlyDropFullMaps(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "h0", b, "eth0")
	inside, host := openNS(t, b.Path), openNS(t, a.Path)
	c := container.Container{ID: 1, NetNS: another(e).NetNS}
	c.Interfaces = []container.Interface{{Kind: "veth", Index: 2, Host: container.HostEnd{NetNS: host.Inode(), NSPath: a.Path, Index: 2}}}
	w, err := e.add(c.TenantKey(), c.ID)
	must(t, err)
	for i := range e.maps.FlTenants.MaxEntries() {
		if _, err := e.cfg.Identity.Take(identity.Tenant{NetNS: 1<<40 + uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.add(another(e), 1); !errors.Is(err, errSlots) {
		t.Errorf("add with no slot left: %v, want errSlots", err)
	}
	key := func(i uint32) []byte {
		return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 1), i)
	}
	for i := range e.maps.FlCounted.MaxEntries() {
		must(t, e.maps.FlCounted.Put(key(i), uint32(1)))
	}
	if err := w.countVeths(inside, c); err == nil {
		t.Error("device with a full map: no error")
	}
	if w.counts.Len() != 0 {
		t.Error("after the error the device counts as watched")
	}
	must(t, e.maps.FlCounted.Delete(key(0)))
	if err := w.countVeths(inside, c); err != nil || w.counts.Len() != 1 {
		t.Errorf("device once there is room: %v", err)
	}
}

// One program counts at all host ends in a namespace, each packet for the tenant with the veth, and for
// none once that has ended.
func TestOneCounter(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	a := testkit.NetNS(t)
	host := openNS(t, a.Path)
	var tenants []*Drops
	var ends []container.End
	for i := range 3 {
		b, name := testkit.NetNS(t), fmt.Sprint("h", i)
		testkit.Veth(t, a, name, b, "eth0")
		index, err := host.Index(name)
		must(t, err)
		w := added(t, e)
		c := container.Container{ID: w.payer, Interfaces: []container.Interface{{
			Kind: "veth", Index: 2, Host: container.HostEnd{NetNS: host.Inode(), NSPath: a.Path, Index: index},
		}}}
		must(t, w.countVeths(openNS(t, b.Path), c))
		tenants, ends = append(tenants, w), append(ends, c.Ends("")...)
	}
	testkit.Same(t, "programs for three tenants", 1, len(e.counters))
	p := tenants[0].veths[ends[0].Device].counter
	counts := func(when string, want ...uint64) {
		t.Helper()
		for _, end := range ends {
			skb := make([]byte, 192) // struct __sk_buff
			binary.NativeEndian.PutUint32(skb[40:], uint32(end.Index))
			must(t, a.Do(func() error {
				_, err := p.Run(&ebpf.RunOptions{Data: frame("10.0.0.1"), Context: skb, Repeat: 1000})
				return err
			}))
		}
		for i, w := range tenants {
			got, err := w.Counters()
			must(t, err)
			testkit.Same(t, fmt.Sprintf("%s: thousand packets of tenant %d", when, i), want[i], got.Small/1000) // the kernel sends some, too
		}
	}
	counts("all", 1, 1, 1)
	must(t, tenants[1].close())
	counts("without the second", 2, 0, 2)
	_, err := e.counter(container.Device{NetNS: host.Inode(), Index: ends[0].Index + len(p.veths)})
	must(t, err)
	testkit.Same(t, "programs once two veths share a place", 2, len(e.counters))
}

// Packets intrude that come in the time of neither their sender nor their receiver.
func TestIntruding(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w := added(t, e)
	const netns, port = 77, 5
	p := countAt(t, e, w, netns, guestMAC())
	layout, err := cgroup.Detect("/proc", kernel.Default().Cgroup)
	must(t, err)
	paths, err := layout.OfPID("/proc", os.Getpid())
	must(t, err)
	group, err := cgroup.ID(paths.V2)
	must(t, err)
	maps := e.cfg.Identity.Maps()
	from := func(ifindex uint32) (intruding uint64) {
		t.Helper()
		skb := make([]byte, 192) // struct __sk_buff
		binary.NativeEndian.PutUint32(skb[36:], ifindex)
		before, err := w.Counters()
		must(t, err)
		_, err = p.Run(&ebpf.RunOptions{Data: frame("10.0.0.1"), Context: skb})
		must(t, err)
		after, err := w.Counters()
		must(t, err)
		return after.Intruding - before.Intruding
	}
	const other, hostEnd = 9, 1 // FL_HOST_END
	for _, c := range []struct {
		name    string
		runs    uint32 // the tenant of this process; 0: none
		ifindex uint32 // where the packet came from; 0: from the host
		sender  [2]uint16
		want    uint64
	}{
		{"from the host, by a socket of the task that runs", 0, 0, [2]uint16{}, 0},
		{"from the host, while the receiver runs", w.Slot, 0, [2]uint16{}, 0},
		{"while its sender runs", other, port, [2]uint16{other, hostEnd}, 0},
		{"while its receiver runs", w.Slot, port, [2]uint16{other, hostEnd}, 0},
		{"while a third tenant runs", other, port, [2]uint16{other + 1, hostEnd}, 1},
		{"while a task of the host runs", 0, port, [2]uint16{other, hostEnd}, 1},
		{"from outside, while a tenant runs", other, port + 1, [2]uint16{other, hostEnd}, 1},
		{"from a device in the tenant's own namespace", other, port, [2]uint16{other, 0}, 1},
	} {
		must(t, maps["fl_cgroups"].Put(group, c.runs))
		must(t, maps["fl_devices"].Put([2]uint32{netns, port}, c.sender))
		if got := from(c.ifindex); got != c.want {
			t.Errorf("%s: %d intrude, want %d", c.name, got, c.want)
		}
	}
}

// A thread that a used-up quota does not stop has no room, for packets from the wire and from this
// host alike.
func TestEarlyDropBeyondQuota(t *testing.T) {
	testkit.OnKernels(t)
	e, w, counter, driver := loaded(t)
	for _, c := range []struct {
		name             string
		stopped, retried uint64
		noRing           uint32
		want             uint32
	}{
		{"not stopped", 0, ahead, 0, tcxNext},
		{"stopped", ahead, ahead, 0, tcxDrop},
		{"stopped, the one that passes each millisecond", ahead, 0, 0, tcxNext},
		{"stopped long ago", 1, ahead, 0, tcxNext},
		{"stopped, and then given super-packets, which have no thread", ahead, ahead, 1, tcxNext},
	} {
		for name, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver, "host end": counter} {
			before := dropTenant{Stopped: c.stopped, Retried: c.retried, NoRing: c.noRing, Waits: ahead, Waiting: ring}
			must(t, e.maps.FlTenants.Put(w.Slot, before))
			if v := run(t, p, frame("10.0.0.1"), 1); v != c.want {
				t.Errorf("%s, at the %s: verdict %d, want %d", c.name, name, v, c.want)
			}
			after, err := w.read()
			must(t, err)
			if dropped := c.want == tcxDrop; (after.Dropped == 1) != dropped || (after.Beyond == 1) != dropped {
				t.Errorf("%s, at the %s: %+v", c.name, name, after)
			}
		}
	}
}

// A tenant with charges at its limit gets nothing until the limit is renewed, or lapses.
func TestEarlyDropBeyondLimit(t *testing.T) {
	testkit.OnKernels(t)
	e, w, counter, driver := loaded(t)
	must(t, w.UseRing(false))
	const slot = 7
	charge := func(ns int64) {
		t.Helper()
		must(t, e.maps.FlCharges.Put(uint32(slot), ns))
	}
	expect := func(when string, want uint32) {
		t.Helper()
		for name, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver, "host end": counter} {
			if v := run(t, p, frame("10.0.0.1"), 3); v != want {
				t.Errorf("%s, at the %s: verdict %d, want %d", when, name, v, want)
			}
		}
	}
	charge(1000)
	expect("no limit", tcxNext)
	for _, c := range []struct {
		limit int64
		want  uint32
	}{{1001, tcxNext}, {1000, tcxDrop}, {-5, tcxDrop}} {
		limited(t, w, slot, c.limit, time.Hour)
		expect(fmt.Sprintf("limit %d of 1000", c.limit), c.want)
	}
	charge(-6) // others took more from it
	expect("limit -5 of -6", tcxNext)
	charge(-5)
	expect("limit -5 of -5", tcxDrop)
	limited(t, w, slot, -5, -time.Second)
	expect("a limit that has lapsed", tcxNext)
	limited(t, w, slot, -5, time.Hour)
	must(t, w.change(func(e *dropTenant) { e.Until = 0 }))
	expect("no limit any more", tcxNext)
}
