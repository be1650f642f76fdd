package traffic_test

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// mode is a path from a container to the uplink.
type mode struct {
	name string
	// make builds it, and returns the destination of the container's packets.
	make func(*host) (*sandbox.Box, container.Container, string)
}

func modes() []mode {
	const wire4, wire6 = "10.66.0.1:9000", "[fd66::1]:9000"
	bridged := func(h *host) (*sandbox.Box, container.Container, string) {
		h.bridge()
		box, c := h.add("one", "10.66.0.2/24", h.ns)
		return box, c, wire4
	}
	return []mode{
		{"bridge", bridged},
		{"bridge, IPv6", func(h *host) (*sandbox.Box, container.Container, string) {
			box, c, _ := bridged(h)
			h.Address(box, "eth0", "fd66::2/64")
			h.Address(h.wire, "wire", "fd66::1/64")
			return box, c, wire6
		}},
		{"routed", func(h *host) (*sandbox.Box, container.Container, string) {
			box, c := h.routed()
			return box, c, wire4
		}},
		{"NAT", func(h *host) (*sandbox.Box, container.Container, string) {
			if _, err := exec.LookPath("iptables"); err != nil {
				testkit.Skip(h.t, "no iptables")
			}
			box, c := h.routed()
			must(h.t, ipt(h.ns, "-t", "nat", "-A", "POSTROUTING", "-o", "nic0", "-j", "MASQUERADE"))
			return box, c, wire4
		}},
		{"overlay, vxlan in another namespace", func(h *host) (*sandbox.Box, container.Container, string) {
			box, c := h.overlay(true)
			return box, c, "10.69.0.1:9000"
		}},
		{"overlay, vxlan in the host's namespace", func(h *host) (*sandbox.Box, container.Container, string) {
			box, c := h.overlay(false)
			return box, c, "10.69.0.1:9000"
		}},
		{"macvlan", func(h *host) (*sandbox.Box, container.Container, string) {
			box, c := h.macvlan("one", "10.66.0.2/24")
			return box, c, wire4
		}},
		{"host", func(h *host) (*sandbox.Box, container.Container, string) {
			h.Address(h.ns, "nic0", "10.66.0.254/24")
			box := h.Create(sandbox.Spec{Name: "one", Network: h.ns})
			return box, h.describe(box), wire4
		}},
	}
}

// In every mode a container's class has exactly its packets.
func TestIdentity(t *testing.T) {
	testkit.Smoke(t)
	testkit.NeedRoot(t)
	for _, m := range testkit.Cases(t, 1, modes()...) {
		t.Run(m.name, func(t *testing.T) {
			h := newHost(t, gbit)
			h.listen()
			box, c, to := m.make(h)
			h.start()
			before := h.state()
			h.resolve(box, h.wire, to)
			must(t, h.apply(c, policy.Net{Weight: 1}))
			own := h.stats(&c)
			sent := h.send(box, to)
			gained, drops := h.gained(&c, own.Packets, sent), h.stats(&c).Drops-own.Drops
			// Beside the datagrams there may be some packets of the protocols.
			if gained < sent || gained > sent+sent/4 || drops != 0 {
				t.Errorf("%d packets were sent: %d are in the container's class, %d dropped", sent, gained, drops)
			}
			h.removes(before, c.ID)
		})
	}
}

// If the priority is overwritten on the way, a packet is in the default class.
func TestOverwritten(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	h := newHost(t, gbit)
	h.listen()
	box, c := h.routed()
	h.start()
	h.resolve(box, h.wire, "10.66.0.1:9000")
	must(t, h.apply(c, policy.Net{Weight: 1}))
	h.traffic.Quiesce(func() { // or it would be restored
		must(t, h.ns.Sysctl("ipv4/ip_forward_update_priority", "1")) // the TOS makes it 0
		own, was := h.stats(&c).Packets, h.stats(nil).Packets
		sent := h.send(box, "10.66.0.1:9000")
		arrived := h.gained(nil, was, sent)
		if gained := h.stats(&c).Packets - own; arrived < sent || gained > sent/4 {
			t.Errorf("of %d packets %d are in the container's class, and %d in nobody's", sent, gained, arrived)
		}
	})
}

// A container gains nothing by claiming a slot or a priority.
func TestForged(t *testing.T) {
	testkit.InFull(t)
	testkit.NeedRoot(t)
	for _, m := range modes() {
		t.Run(m.name, func(t *testing.T) {
			h := newHost(t, gbit)
			h.listen()
			box, c, to := m.make(h)
			h.start()
			h.resolve(box, h.wire, to)
			// Another container's slot, while it has a different policy.
			other := fake(1)
			must(t, h.apply(other, policy.Net{Weight: 1}))
			for _, shaped := range []bool{false, true} {
				net := policy.Net{}
				if shaped {
					net.Weight = 1
				}
				must(t, h.apply(c, net))
				before := h.stats(&other).Packets
				all := func() uint64 { return h.stats(&other).Packets + h.stats(&c).Packets + h.stats(nil).Packets }
				was := all()
				h.forge(box, to, qdisc.Handle|1, 20)
				if n := counted(all, was, 20); n < 20 {
					t.Errorf("shaped %v: %d of 20 packets came to the uplink", shaped, n)
				}
				if n := h.stats(&other).Packets - before; n != 0 {
					t.Errorf("shaped %v: %d packets got into the other's class", shaped, n)
				}
			}
		})
	}
}

// routed makes a container whose packets the host routes to the uplink.
func (h *host) routed() (*sandbox.Box, container.Container) {
	h.t.Helper()
	h.Address(h.ns, "nic0", "10.66.0.254/24")
	must(h.t, h.ns.Bridge("br0", netip.MustParsePrefix("10.67.0.1/24")))
	must(h.t, h.ns.Sysctl("ipv4/ip_forward", "1"))
	box, c := h.add("one", "10.67.0.2/24", h.ns)
	h.Route(box, "0.0.0.0/0", "10.67.0.1")
	h.Route(h.wire, "10.67.0.0/24", "10.66.0.254")
	return box, c
}

// overlay makes a container behind a tunnel: like Docker, with bridge and tunnel in a namespace of
// their own, or with both in the host's.
func (h *host) overlay(apart bool) (*sandbox.Box, container.Container) {
	h.t.Helper()
	return h.tunnelled(apart, true)
}

// tunnelled is overlay; bound: the tunnel names the device below it, and reports its rate.
func (h *host) tunnelled(apart, bound bool) (*sandbox.Box, container.Container) {
	h.t.Helper()
	h.Address(h.ns, "nic0", "10.66.0.254/24")
	at := h.ns
	if apart {
		h.apart = h.Create(sandbox.Spec{Name: "troverlay", Bare: true})
		at = h.apart
	}
	must(h.t, at.Bridge("br0", netip.Prefix{}))
	var nic, wire string
	if bound {
		nic, wire = "nic0", "wire"
	}
	h.Tunnel(h.ns, nic, "10.66.0.1", sandbox.End{Box: at, Bridge: "br0"})
	h.Tunnel(h.wire, wire, "10.66.0.254", sandbox.End{Box: h.wire, Addr: netip.MustParsePrefix("10.69.0.1/24")})
	return h.add("one", "10.69.0.2/24", at)
}

// macvlan makes a container with a device of that kind on nic0.
func (h *host) macvlan(name, addr string) (*sandbox.Box, container.Container) {
	h.t.Helper()
	box := h.Create(sandbox.Spec{Name: name})
	dev := h.Macvlan(h.ns, sandbox.End{Box: box, Name: "mv0", Addr: netip.MustParsePrefix(addr)})
	c := h.describe(box)
	c.Interfaces = []container.Interface{dev}
	return box, c
}

// sender is one of two neighbouring containers.
type sender struct {
	box *sandbox.Box
	c   container.Container
	to  string // its address from the wire
}

// run starts a generator in a box, and returns its board when it is at work.
func (h *host) run(box *sandbox.Box, args ...string) *load.Board {
	h.t.Helper()
	board, _ := h.Load(box, nil, args...)
	return board
}

// two makes two containers in a mode, and returns the address of the wire there.
func (h *host) two(mode string) (a, b sender, to string) {
	h.t.Helper()
	to = "10.66.0.1"
	switch mode {
	case "bridge":
		h.bridge()
		a.box, a.c = h.add("one", "10.66.0.2/24", h.ns)
		b.box, b.c = h.add("two", "10.66.0.3/24", h.ns)
	case "routed":
		a.box, a.c = h.routed()
		b.box, b.c = h.add("two", "10.67.0.3/24", h.ns)
		h.Route(b.box, "0.0.0.0/0", "10.67.0.1")
	case "overlay":
		a.box, a.c = h.overlay(false)
		b.box, b.c = h.add("two", "10.69.0.3/24", h.ns)
		to = "10.69.0.1"
	case "macvlan":
		a.box, a.c = h.macvlan("one", "10.66.0.2/24")
		b.box, b.c = h.macvlan("two", "10.66.0.3/24")
	case "host":
		h.Address(h.ns, "nic0", netip.MustParsePrefix("10.66.0.254/24").String())
		a.box = h.Create(sandbox.Spec{Name: "one", Network: h.ns})
		b.box = h.Create(sandbox.Spec{Name: "two", Network: h.ns})
		a.c, b.c = h.describe(a.box), h.describe(b.box)
	}
	return a, b, to
}

// In TestHostile a container with full control of its namespace tries to get into its neighbour's
// class, or out of all classes. TestForged covers its priorities and marks, TestArrivalForged its
// flows.
func TestHostile(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.listen()
	h.bridge()
	good, victim := h.add("one", "10.66.0.2/24", h.ns)
	bad, liar := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	must(t, h.apply(victim, policy.Net{Weight: 1}))
	mostly(t, h.apply(liar, policy.Net{Weight: 1, Ceil: 100 * mbit}))
	veth := h.Index(h.ns, "htwo")
	must(t, good.Sysctl("ipv6/conf/all/disable_ipv6", "1")) // IPv6 sends packets by itself
	h.resolve(good, h.wire, "10.66.0.1:9000")
	eth0 := func(fn func(*netlink.Handle, netlink.Link) error) {
		t.Helper()
		h.Change(bad, "eth0", fn)
	}
	for _, attack := range []struct {
		name string
		do   func()
	}{
		{"nothing yet", func() {}},
		{"our qdisc on its own device", func() {
			eth0(func(n *netlink.Handle, l netlink.Link) error { return forgeRoot(n, l, gbit) })
		}},
		{"another queue length, and super-packets", func() {
			eth0(func(n *netlink.Handle, l netlink.Link) error {
				queue, gso := n.LinkSetTxQLen(l, 100_000), n.LinkSetGSOMaxSize(l, 65536)
				t.Logf("queue length: %v, gso_max_size: %v", queue, gso)
				for _, err := range []error{queue, gso} {
					if err != nil && !errors.Is(err, unix.ERANGE) { // newer kernels have bounds
						return err
					}
				}
				return nil
			})
		}},
		{"the neighbour's MAC", func() {
			mac, err := net.ParseMAC(h.MAC(good, "eth0"))
			must(t, err)
			eth0(func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetHardwareAddr(l, mac) })
		}},
		{"the neighbour's address", func() {
			eth0(func(n *netlink.Handle, l netlink.Link) error {
				for _, a := range []string{"10.66.0.3/24", "10.66.0.2/24"} {
					addr, err := netlink.ParseAddr(a)
					if err != nil {
						return err
					}
					change := n.AddrDel
					if a == "10.66.0.2/24" {
						change = n.AddrAdd
					}
					if err := change(l, addr); err != nil {
						return err
					}
				}
				return nil
			})
		}},
		{"its device down and up, by another name", func() {
			eth0(func(n *netlink.Handle, l netlink.Link) error {
				if err := n.LinkSetDown(l); err != nil {
					return err
				}
				if err := n.LinkSetName(l, "flifb1"); err != nil {
					return err
				}
				return n.LinkSetUp(l)
			})
		}},
	} {
		t.Run(attack.name, func(t *testing.T) {
			attack.do()
			before, own, held := h.stats(&victim).Packets, h.stats(&liar).Packets, h.passed(h.ns, veth)
			sent := h.send(bad, "10.66.0.1:9000")
			if n := h.gained(&liar, own, sent); n < sent {
				t.Errorf("%d packets were sent, %d are in its own class", sent, n)
			}
			if n := h.stats(&victim).Packets - before; n > 5 { // neighbour discovery, of the victim
				t.Errorf("%d packets got into the neighbour's class", n)
			}
			if n := h.passed(h.ns, veth) - held; h.leads() && n < sent {
				t.Errorf("%d packets were sent, %d of them met the ceil", sent, n)
			}
		})
	}
}

// leads reports whether this kernel can limit egress at a container's veth.
func (h *host) leads() bool {
	h.t.Helper()
	return !hook.Open("/proc", h.journal).Filters()
}

// forgeRoot puts a root qdisc with our handle at a device, with one class of a rate.
func forgeRoot(n *netlink.Handle, l netlink.Link, rate uint64) error {
	at := func(handle, parent uint32) netlink.QdiscAttrs {
		return netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: handle, Parent: parent}
	}
	burst := uint32(rate/1000) + 1600
	root := netlink.NewHtb(at(qdisc.Handle, netlink.HANDLE_ROOT))
	root.Defcls = 1
	if err := n.QdiscReplace(root); err != nil {
		return err
	}
	return n.ClassAdd(netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: l.Attrs().Index, Handle: qdisc.Handle | 1, Parent: qdisc.Handle},
		netlink.HtbClassAttrs{Rate: rate, Ceil: rate, Buffer: burst, Cbuffer: burst}))
}
