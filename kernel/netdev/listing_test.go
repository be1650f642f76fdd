package netdev

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The devices of a watched namespace are read once, and then kept up to date by the messages. The
// list includes every change before the call.
func TestMonitorLinks(t *testing.T) {
	made := testkit.NetNS(t)
	ns := open(t, made.Path)
	m := NewMonitor()
	stop, err := m.Watch(ns, Interest{}, nil)
	must(t, err)
	defer stop()
	reads := 0
	list := func() []Link {
		t.Helper()
		s := m.space(ns.inode)
		s.mu.Lock()
		// As Links does: too many messages may still wait in the socket.
		must(t, s.sockets[devices].conn.Control(func(fd uintptr) { s.drain(int(fd), devices) }))
		if !s.devices.known {
			reads++
		}
		s.mu.Unlock()
		links, err := m.Links(ns, MostLinks)
		must(t, err)
		return links
	}
	same := func(when string, want int) {
		t.Helper()
		got := list()
		read, err := ns.Links(MostLinks)
		must(t, err)
		byIndex := cmpopts.SortSlices(func(a, b Link) bool { return a.Index < b.Index })
		addrs := cmpopts.SortSlices(func(a, b string) bool { return a < b })
		testkit.Same(t, when, read, got, byIndex, addrs, cmpopts.EquateEmpty())
		testkit.Same(t, when+": reads of all devices", want, reads)
	}
	same("at first", 1)
	h := made.Handle(t)
	for i := range 20 {
		name := fmt.Sprint("fl", i)
		must(t, h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: name}}))
		same(name, 1)
		made.Address(t, name, fmt.Sprintf("10.1.%d.1/24", i))
		same(name+" has an address", 1)
	}
	link, err := h.LinkByName("fl7")
	must(t, err)
	must(t, errors.Join(h.LinkSetName(link, "flnew"), h.LinkSetMTU(link, 1400)))
	same("one is renamed", 1)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "flbr"}}
	must(t, errors.Join(h.LinkAdd(bridge), h.LinkSetMaster(link, bridge)))
	same("is a port of a bridge", 1)
	must(t, h.LinkSetNoMaster(link))
	same("and no more", 1)
	addr, err := netlink.ParseAddr("10.1.7.1/24")
	must(t, errors.Join(err, h.AddrDel(link, addr)))
	same("has no address", 1)
	must(t, h.LinkDel(link))
	same("and is removed", 1)
	for i := range 30 {
		must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("flv", i)}, PeerName: fmt.Sprint("flw", i)}))
	}
	same("pairs", 1)
	for range 2 * mostWaiting {
		must(t, errors.Join(h.LinkSetMTU(bridge, 1400), h.LinkSetMTU(bridge, 1500)))
	}
	same("after too many changes", 2)
	old := list()
	was := slices.Clone(old)
	must(t, h.LinkSetMTU(bridge, 1300))
	same("once more", 2)
	testkit.Same(t, "a list after it was returned", was, old)
}

// More addresses than are listed: one that was left out takes the place of one that goes.
func TestMonitorLinksOfManyAddresses(t *testing.T) {
	made := testkit.NetNS(t)
	ns := open(t, made.Path)
	m := NewMonitor()
	stop, err := m.Watch(ns, Interest{}, nil)
	must(t, err)
	defer stop()
	h := made.Handle(t)
	must(t, h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flmany"}}))
	count := func() int {
		links, err := m.Links(ns, MostLinks)
		must(t, err)
		return len(links[slices.IndexFunc(links, func(l Link) bool { return l.Name == "flmany" })].Addrs)
	}
	count()
	for i := range maxAddrs + 1 {
		made.Address(t, "flmany", fmt.Sprintf("10.1.%d.1/32", i))
	}
	testkit.Same(t, "addresses are listed", maxAddrs, count())
	link, err := h.LinkByName("flmany")
	must(t, err)
	addr, err := netlink.ParseAddr("10.1.0.1/32")
	must(t, errors.Join(err, h.AddrDel(link, addr)))
	testkit.Same(t, "addresses are listed after one was removed", maxAddrs, count())
}
