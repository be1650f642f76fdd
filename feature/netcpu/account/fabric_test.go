package account

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"testing"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// fabric is a host with a bridge, an uplink to the wire, and containers.
type fabric struct {
	*lab
	wire, host *sandbox.Box
	ends       map[*sandbox.Box]netip.Addr // of all containers at the bridge
	v6         bool                        // see sixth
}

// newHost makes a fabric's host, without a device.
func newHost(t testing.TB, m *Meter) *fabric {
	t.Helper()
	l := newLab(t, m)
	f := &fabric{lab: l, wire: l.bare("wire"), host: l.bare("host"), ends: make(map[*sandbox.Box]netip.Addr)}
	// A device that does not exist makes the namespace the host's.
	_, err := m.cfg.Identity.Tell("fabric", identity.Member{ID: 1, Devices: []identity.Device{
		{Netns: l.Open(f.host).Inode(), Ifindex: math.MaxInt32, HostEnd: true, Trusted: true},
	}})
	must(t, err)
	return f
}

// newFabric makes a fabric with a NIC that hands its packets to CPU 0.
func newFabric(t testing.TB, m *Meter) *fabric {
	t.Helper()
	f := newHost(t, m)
	f.bridge(f.host, "10.66.0.254/24")
	// Where br_netfilter passes bridged packets to the firewall, it drops packets with a bad
	// header, and reassembles fragments.
	for _, family := range []string{"ip", "ip6"} {
		if err := f.host.Sysctl("bridge/bridge-nf-call-"+family+"tables", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	outside := prefix("10.66.0.1/24")
	f.lab.wire(sandbox.End{Box: f.wire, Name: "wire", Addr: outside}, sandbox.End{Box: f.host, Name: "nic0", Bridge: "br0"}, "1")
	must(t, f.host.Forward("nic0", mac(outside.Addr())))
	f.ends[f.wire], f.ends[f.host] = outside.Addr(), prefix("10.66.0.254/24").Addr()
	f.world(f.wire, "wire")
	return f
}

// bridge makes br0 without multicast snooping, so that it sends no queries to all ports.
func (l *lab) bridge(b *sandbox.Box, addr string) {
	l.t.Helper()
	var snoops bool
	at := prefix(addr)
	must(l.t, b.Add(&netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs(), MulticastSnooping: &snoops},
		sandbox.End{Box: b, Name: "br0", Addr: at, MAC: mac(at.Addr())}))
}

// polls makes the NIC poll, also for single packets, on the CPU that receives them, as real NICs
// do.
func (f *fabric) polls() {
	f.t.Helper()
	f.rps(f.host, "nic0", "0")
	must(f.t, sandbox.LikeNIC(sandbox.End{Box: f.host, Name: "nic0"}, sandbox.End{Box: f.wire, Name: "wire"}))
}

// add puts a container behind the host's bridge. It and the present containers have neighbour
// entries for one another, and the bridge has its address, so that it receives its own packets and
// no others.
func (f *fabric) add(name string, last int) *sandbox.Box {
	f.t.Helper()
	box := f.addTo(f.host, name, last)
	addr := netip.AddrFrom4([4]byte{10, 66, 0, byte(last)})
	must(f.t, f.host.Forward(fmt.Sprintf("h%d", last), mac(addr)))
	for other, at := range f.ends {
		dev := "eth0"
		switch other {
		case f.wire:
			dev = "wire"
		case f.host:
			dev = "br0"
		}
		must(f.t, box.Neighbour("eth0", at, mac(at)))
		must(f.t, other.Neighbour(dev, addr, mac(addr)))
	}
	f.ends[box] = addr
	return box
}

// addTo puts a container behind the bridge br0 of a namespace.
func (f *fabric) addTo(at *sandbox.Box, name string, last int) *sandbox.Box {
	f.t.Helper()
	box := f.box(name)
	end := fmt.Sprintf("h%d", last)
	f.lab.wire(sandbox.End{Box: box, Name: "eth0", Addr: prefix(fmt.Sprintf("10.66.0.%d/24", last))},
		sandbox.End{Box: at, Name: end, Bridge: "br0"}, "")
	f.watch(box, f.device(at, end, true), f.device(box, "eth0", false))
	return box
}

// victim adds a container that computes on CPU 0.
func (f *fabric) victim() *sandbox.Box {
	f.t.Helper()
	v := f.box("victim")
	f.watch(v)
	f.load(v, 0, "burn")
	return v
}

// sixth also gives the ends of a path an IPv6 address: fd00:66::n.
func (f *fabric) sixth(box *sandbox.Box, last int) {
	f.t.Helper()
	f.v6 = true
	for _, b := range []*sandbox.Box{f.wire, f.host, box} {
		f.ipv6(b, true)
	}
	f.Address(f.wire, "wire", "fd00:66::1/64")
	f.Address(f.host, "br0", "fd00:66::254/64")
	f.Address(box, "eth0", fmt.Sprintf("fd00:66::%d/64", last))
}

// overlay makes an overlay network as Docker does (10.67.0.0/24): VXLAN device, bridge and host
// ends in a namespace of their own, the tunnel's packets in the host's. Outside is 10.67.0.1.
func (f *fabric) overlay() *sandbox.Box {
	f.t.Helper()
	overlay := f.bare("overlay")
	f.bridge(overlay, "10.67.0.254/24")
	f.Tunnel(f.host, "", "10.66.0.1", sandbox.End{Box: overlay, Bridge: "br0"})
	f.Tunnel(f.wire, "", "10.66.0.254", sandbox.End{Box: f.wire, Addr: prefix("10.67.0.1/24")})
	return overlay
}

// inOverlay adds a container to an overlay, with the address 10.67.0.n.
func (f *fabric) inOverlay(overlay *sandbox.Box, name string, n int) *sandbox.Box {
	f.t.Helper()
	box := f.addTo(overlay, name, n)
	f.Address(box, "eth0", fmt.Sprintf("10.67.0.%d/24", n))
	return box
}

// shape puts an HTB at a device, with a class for each of the rates, in bit/s. The first class is
// the default.
func (l *lab) shape(b *sandbox.Box, dev string, rates ...uint64) {
	l.t.Helper()
	l.Change(b, dev, func(h *netlink.Handle, k netlink.Link) error {
		index := k.Attrs().Index
		// The queues of the classes take this length.
		if err := h.LinkSetTxQLen(k, 1000); err != nil {
			return err
		}
		root := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT})
		root.Defcls = 1
		if err := h.QdiscAdd(root); err != nil {
			return err
		}
		for i, rate := range rates {
			attrs := netlink.ClassAttrs{LinkIndex: index, Parent: root.Handle, Handle: netlink.MakeHandle(1, uint16(1+i))}
			if err := h.ClassAdd(netlink.NewHtbClass(attrs, netlink.HtbClassAttrs{Rate: rate, Ceil: rate, Buffer: 3000, Cbuffer: 3000})); err != nil {
				return err
			}
		}
		return nil
	})
}

// redirect redirects all packets that a device receives to an IFB.
func (l *lab) redirect(b *sandbox.Box, dev, ifb string) {
	l.t.Helper()
	must(l.t, b.Add(&netlink.Ifb{LinkAttrs: netlink.NewLinkAttrs()}, sandbox.End{Box: b, Name: ifb}))
	l.Change(b, dev, func(h *netlink.Handle, k netlink.Link) error {
		to, err := h.LinkByName(ifb)
		if err != nil {
			return err
		}
		index, ingress := k.Attrs().Index, netlink.MakeHandle(0xffff, 0)
		err = h.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: ingress, Parent: netlink.HANDLE_INGRESS}})
		if err != nil {
			return err
		}
		return h.FilterAdd(&netlink.U32{ // without a selector it matches all packets
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: ingress, Priority: 1, Protocol: unix.ETH_P_ALL},
			Actions:     []netlink.Action{netlink.NewMirredAction(to.Attrs().Index)},
		})
	})
}

// segmented makes a device receive TCP segments one by one.
func (l *lab) segmented(b *sandbox.Box, dev string) {
	l.t.Helper()
	must(l.t, b.Do(func() error {
		e, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer e.Close()
		return e.Change(dev, map[string]bool{"tx-tcp-segmentation": false, "tx-generic-segmentation": false})
	}))
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
