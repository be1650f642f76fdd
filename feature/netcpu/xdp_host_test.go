package netcpu_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// byXDP makes the host's uplink drop in its driver.
func (h *host) byXDP() {
	h.t.Helper()
	must(h.t, h.netcpu.Close())
	h.open("nic0", "nic9")
}

// xdp returns the id of the XDP program at nic0, 0 for none.
func (h *host) xdp() (id uint32) {
	h.t.Helper()
	h.Change(h.ns, "nic0", func(_ *netlink.Handle, l netlink.Link) error {
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			id = x.ProgId
		}
		return nil
	})
	return id
}

// features returns all offloads of both ends of the wire, and their maximum frame sizes.
func (h *host) features() map[string]string {
	h.t.Helper()
	all := make(map[string]string)
	for dev, box := range map[string]*sandbox.Box{"nic0": h.ns, "wire": h.wire} {
		ns := h.Open(box)
		for _, o := range []netdev.Offload{netdev.GRO, netdev.TSO, netdev.HardwareGRO} {
			v, err := ns.Offload(h.Index(box, dev), o).Read()
			must(h.t, err)
			all[dev+" "+string(o)] = v
		}
		l, err := ns.Link(h.Index(box, dev))
		must(h.t, err)
		all[dev+" mtu"] = strconv.Itoa(l.MTU)
	}
	return all
}

// dropPoint returns the hook at which the uplink drops.
func (h *host) dropPoint() drop.Point {
	h.t.Helper()
	for _, d := range h.netcpu.InForce().Points {
		if d.Device == "nic0" {
			return d
		}
	}
	return drop.Point{}
}

// Packets dropped in the driver because of a used-up budget are counted and charged to their owner
// like packets that tc drops. The program stays when the last container has gone,
// and the device is unchanged once it ends.
func TestXDPDropsAreCharged(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, sandbox.CPU{})
	h.byXDP()
	before := h.features()
	h.start(h.box, "udp-recv", "--listen", ":9000")
	must(t, h.box.Limit(sandbox.CPU{Quota: 5 * time.Millisecond, Period: 100 * time.Millisecond}))
	h.apply(h.container, policy.NetCPUCharge)
	if d := h.dropPoint(); d.By != drop.ByXDP || d.Why != "" || h.xdp() == 0 {
		t.Fatalf("the uplink drops at %+v, its XDP program is %d", d, h.xdp())
	}
	if d := h.netcpu.InForce().Points; len(d) != 2 || d[1].Device != "nic9" || d[1].By != "" || d[1].Why == "" {
		t.Errorf("drop points %+v, one of them for a name that no device has", d)
	}
	h.chargedDrops(byQuota)

	was := h.xdp()
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if id := h.xdp(); id != was || h.dropPoint().By != drop.ByXDP {
		t.Errorf("after Remove: XDP program %d in place of %d, drop points %+v", id, was, h.netcpu.InForce().Points)
	}
	h.nothing("after Remove")
	h.apply(h.container, policy.NetCPUCharge)
	if id := h.xdp(); id != was || h.dropPoint().By != drop.ByXDP {
		t.Errorf("applied again: XDP program %d in place of %d, drop points %+v", id, was, h.netcpu.InForce().Points)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	must(t, h.netcpu.Close())
	if id := h.xdp(); id != 0 || len(h.netcpu.InForce().Points) != 0 {
		t.Errorf("after Close: XDP program %d, drop points %+v", id, h.netcpu.InForce().Points)
	}
	same(t, "after Close", h.features(), before)
}

// flood sends to the container, and returns once packets are dropped, while the flood continues. It
// returns a function that counts the drops.
func (h *host) flood(count func(drop.Counters) uint64, args ...string) (dropped func() uint64) {
	h.t.Helper()
	var began time.Time
	more := func() {
		h.start(h.wire, append([]string{"udp-send", "--to", "10.66.0.2:9000"}, args...)...)
		began = time.Now()
	}
	more()
	dropped = func() uint64 { return count(h.netcpu.InForce().Drops[h.container.ID]) }
	until(h.t, "packets are dropped", func() bool {
		if time.Since(began) > 5*time.Second { // a slow machine may not send enough
			more()
		}
		return dropped() > enough(100)
	})
	return dropped
}

// A dropped packet counts with all of its bytes, including further fragments.
func TestXDPCountsFragments(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{Quota: 5 * time.Millisecond, Period: 100 * time.Millisecond})
	for _, d := range []struct {
		box  *sandbox.Box
		name string
	}{{h.wire, "wire"}, {h.ns, "nic0"}, {h.ns, "h0"}, {h.box, "eth0"}, {h.ns, "br0"}} {
		h.Change(d.box, d.name, func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetMTU(l, 9000) })
	}
	h.byXDP()
	h.start(h.box, "udp-recv", "--listen", ":9000")
	h.apply(h.container, policy.NetCPUCharge)
	if d := h.dropPoint(); d.By != drop.ByXDP {
		t.Fatalf("the uplink drops at %+v", d)
	}
	received := func() account.Work { return h.accounts()[h.container.ID].Receive[account.UDP] }
	dropped := h.flood(byQuota, "--size", "8000")
	before, from := received(), dropped()
	until(t, "some more are", func() bool { return dropped() > from+enough(200) })
	now := received()
	if packets, bytes := now.Packets-before.Packets, now.Bytes-before.Bytes; packets == 0 || bytes/packets < 7000 {
		t.Errorf("%d packets of 8000 bytes have %d", packets, bytes)
	}
}

// chargedDrops floods the container until packets are dropped, and checks which account they are
// in.
func (h *host) chargedDrops(count func(drop.Counters) uint64) {
	t := h.t
	t.Helper()
	dropped := h.flood(count)
	was, before := h.accounts(), dropped() // in this order: the drops are counted no later than this
	until(t, "some more are dropped", func() bool { return dropped() > before+enough(5000) })
	drops := dropped() - before
	// grown returns the growth of an account: received packets and their cost.
	grown := func(id container.ID) (packets uint64, cpu time.Duration) {
		now := h.accounts()[id]
		for protocol, w := range now.Receive {
			packets += w.Packets - was[id].Receive[protocol].Packets
		}
		return packets, now.CPU() - was[id].CPU()
	}
	until(t, fmt.Sprintf("the account has the %d packets that were dropped", drops), func() bool {
		packets, _ := grown(h.container.ID)
		return packets >= drops
	})
	_, own := grown(h.container.ID)
	packets, system := grown(account.System)
	t.Logf("of %d dropped and the others: its own %v, the system's %v", drops, own, system)
	if packets >= drops || own <= system {
		t.Errorf("of what came in, %v are its own, and nobody's are %v and %d packets, where %d were dropped", own, system, packets, drops)
	}
	h.addsUp("with drops")
}

// verdict returns another owner's program, which lets everything pass.
func verdict(t *testing.T) *ebpf.Program {
	t.Helper()
	p := testkit.Opened(testkit.Verdict(ebpf.XDP, "cil_xdp", 2))(t)
	return p
}

// Another owner's XDP program stays in place, in any mode and however it was attached; if the
// driver refuses ours, nothing has changed. tc drops packets then, and the point reports the
// reason.
func TestXDPKeepsOut(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	h.byXDP()
	channels := func(rx uint32) error {
		return h.Open(h.ns).Do(func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			_, err = e.SetChannels("nic0", ethtool.Channels{RxCount: rx, TxCount: 2})
			return err
		})
	}
	var foreign link.Link
	for _, c := range []struct {
		name       string
		begin, end func() error
		why        error
	}{
		{"too few queues", func() error { return channels(1) }, func() error { return channels(2) }, unix.ENOSPC},
		{"a link", func() error {
			return h.Open(h.ns).Do(func() (err error) {
				foreign, err = link.AttachXDP(link.XDPOptions{Interface: h.Index(h.ns, "nic0"), Program: verdict(t), Flags: link.XDPDriverMode})
				return err
			})
			// Close is not enough: a process that lists links keeps this one open for a moment.
		}, func() error { return errors.Join(foreign.Detach(), foreign.Close()) }, netdev.ErrXDPTaken},
		{"generic", func() error { return h.attach(verdict(t), unix.XDP_FLAGS_SKB_MODE) }, func() error { return h.attach(nil, unix.XDP_FLAGS_SKB_MODE) }, netdev.ErrXDPTaken},
	} {
		must(t, c.begin())
		was, before := h.xdp(), h.features()
		for range 2 {
			h.apply(h.container, policy.NetCPUIsolate)
		}
		if d := h.dropPoint(); d.By != drop.ByTC || !strings.Contains(d.Why, c.why.Error()) {
			t.Errorf("%s: the uplink drops at %+v", c.name, d)
		}
		must(t, h.netcpu.Remove(t.Context(), h.container.ID))
		if id := h.xdp(); id != was || (c.why == netdev.ErrXDPTaken) != (was != 0) {
			t.Errorf("%s: XDP program %d in place of %d", c.name, id, was)
		}
		same(t, c.name+", after Remove", h.features(), before)
		must(t, c.end())
	}
}

// attach attaches an XDP program to nic0 as `ip link` does; nil detaches it.
func (h *host) attach(p *ebpf.Program, flags int) error {
	fd := -1
	if p != nil {
		fd = p.FD()
	}
	return h.ns.Change("nic0", func(_ *netlink.Handle, l netlink.Link) error {
		// Without the handle: its call takes no flags.
		return h.Open(h.ns).Do(func() error { return netlink.LinkSetXdpFdWithFlags(l, fd, flags) })
	})
}

// The next Apply learns a changed address of an uplink. An uplink may go, move to another namespace, or
// be replaced by one with the same index or another. None of that is an error: the present uplink
// drops, and its threads are in their place.
func TestXDPFollowsUplink(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, sandbox.CPU{})
	h.byXDP()
	h.apply(h.container, policy.NetCPUIsolate)
	was := h.xdp()
	const first, second = "02:00:00:00:00:09", "02:00:00:00:00:0a"
	mac, err := net.ParseMAC(first)
	must(t, err)
	h.Change(h.ns, "nic0", func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetHardwareAddr(l, mac) })
	h.apply(h.container, policy.NetCPUIsolate)
	if id := h.xdp(); was == 0 || id == 0 || id == was {
		t.Errorf("XDP program %d, and %d once the address had changed", was, id)
	}
	number := h.Index(h.ns, "nic0")
	for _, c := range []struct {
		what   string
		change func()
		there  bool
	}{
		{"another has its number and its address", func() { h.remake(h.ns, number, first) }, true},
		{"another has its number", func() { h.remake(h.ns, number, second) }, true},
		{"it is gone", func() { must(t, h.ns.Delete("nic0")) }, false},
		{"another is there", func() { h.remake(nil, 0, "") }, true},
		{"it was given away", func() {
			wire, err := os.Open(h.wire.NetNS())
			must(t, err)
			defer wire.Close()
			h.Change(h.ns, "nic0", func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetNsFd(l, int(wire.Fd())) })
		}, false},
		{"one more is there", func() { h.remake(h.wire, 0, "") }, true},
	} {
		c.change()
		h.apply(h.container, policy.NetCPUIsolate)
		if d := h.dropPoint(); (d.By == drop.ByXDP) != c.there || d.Why != "" && c.there {
			t.Errorf("%s: it drops at %+v", c.what, d)
		}
		if !c.there {
			err := h.wire.Change("nic0", func(_ *netlink.Handle, l netlink.Link) error {
				if x := l.Attrs().Xdp; x != nil && x.Attached {
					t.Errorf("%s: XDP program %d is still at it", c.what, x.ProgId)
				}
				return nil
			})
			var missing netlink.LinkNotFoundError
			if err != nil && !errors.As(err, &missing) {
				t.Fatal(err)
			}
			continue
		}
		if h.xdp() == 0 {
			t.Errorf("%s: it has no XDP program", c.what)
		}
		threads := h.threads()["nic0"]
		if len(threads) == 0 || slices.ContainsFunc(threads, func(group string) bool { return group != h.uplinkGroup() }) {
			t.Errorf("%s: its threads are in %q", c.what, threads)
		}
	}
	must(t, h.netcpu.Close())
	if id := h.xdp(); id != 0 {
		t.Errorf("XDP program %d after Close", id)
	}
}

// remake makes nic0 again, with a number and an address (0 and "": any), once the one in old has
// gone; nil: it has gone already.
func (h *host) remake(old *sandbox.Box, number int, mac string) {
	t := h.t
	t.Helper()
	if old != nil {
		must(t, old.Delete("nic0"))
	}
	wire, err := os.Open(h.wire.NetNS())
	must(t, err)
	defer wire.Close()
	var addr net.HardwareAddr
	if mac != "" {
		addr, err = net.ParseMAC(mac)
		must(t, err)
	}
	h.Change(h.ns, "br0", func(n *netlink.Handle, br netlink.Link) error {
		return n.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "nic0", Index: number, HardwareAddr: addr, MasterIndex: br.Attrs().Index, NumRxQueues: 2, NumTxQueues: 2},
			PeerName:  "wire", PeerNamespace: netlink.NsFd(int(wire.Fd())), PeerNumRxQueues: 2, PeerNumTxQueues: 2,
		})
	})
	h.Change(h.wire, "wire", (*netlink.Handle).LinkSetUp)
	h.Change(h.ns, "nic0", (*netlink.Handle).LinkSetUp)
	must(t, h.Open(h.ns).Offload(h.Index(h.ns, "nic0"), netdev.GRO).Write(netdev.GRO.On()))
}
