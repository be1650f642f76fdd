package traffic_test

import (
	"errors"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// TestHostile has a container with full control of its namespace try to be in its neighbour's
// class, or in none. TestForged covers its priorities and marks, TestArrivalForged its flows.
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
