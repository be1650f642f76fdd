package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// paths are the causes that may make packets go another way.
var paths = []Cause{LinkChanged, AddressChanged, RouteChanged, NeighbourChanged, FDBChanged, FilterChanged, NFTChanged, PolicyChanged}

// watched has a namespace with a watch.
type watched struct {
	*testkit.NS
	t     *testing.T
	h     *netlink.Handle
	told  chan Change
	marks int
}

func newWatched(t *testing.T, kit *testkit.NS, path string) *watched {
	t.Helper()
	told, stop := watching(t, NewMonitor(), open(t, kit.Path), Interest{Causes: paths, Path: path})
	t.Cleanup(func() { must(t, stop()) })
	return &watched{NS: kit, t: t, h: kit.Handle(t), told: told}
}

// watching watches a namespace until stop is called.
func watching(t *testing.T, m *Monitor, ns *NS, about Interest) (told chan Change, stop func() error) {
	t.Helper()
	told = make(chan Change, 10000)
	stop, err := m.Watch(ns, about, func(changes []Change) {
		for _, c := range changes {
			told <- c
		}
	})
	must(t, err)
	return told, stop
}

// hears waits for a change, and returns the ones before it.
func (w *watched) hears(when string, want Change) (before []Change) {
	w.t.Helper()
	return hears(w.t, w.told, when, want)
}

func hears(t *testing.T, told <-chan Change, when string, want Change) (before []Change) {
	t.Helper()
	for {
		select {
		case c := <-told:
			if c == want {
				return before
			}
			before = append(before, c)
		case <-time.After(time.Minute):
			t.Fatalf("%s: %v is not told, but %v", when, want, before)
		}
	}
}

// silent checks that the watch has ignored the neighbour changes so far, though the kernel reported
// them.
func (w *watched) silent(when string) {
	w.t.Helper()
	w.marks++
	ifb := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("flmark", w.marks)}}
	must(w.t, w.h.LinkAdd(ifb))
	for _, c := range w.hears(when, Change{LinkChanged, ifb.Index}) {
		if c.Cause == NeighbourChanged || c.Cause == FDBChanged || c.Cause == Overrun {
			w.t.Errorf("%s: %v is told", when, c)
		}
	}
}

func TestWatch(t *testing.T) {
	kit, other := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, kit, "flout", other, "flin")
	kit.Address(t, "flout", "192.0.2.1/24")
	h := kit.Handle(t)
	out, err := h.LinkByName("flout")
	must(t, err)
	index := out.Attrs().Index
	vxlan := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "fltunnel"}, VxlanId: 1, Port: 8472}
	must(t, h.LinkAdd(vxlan))
	mac := func(last byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, last} }
	ip := func(last byte) net.IP { return net.IPv4(192, 0, 2, last).To4() }
	near := func(last byte, lladdr net.HardwareAddr, state int) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: index, State: state, IP: ip(last), HardwareAddr: lladdr}
	}
	far := func(lladdr net.HardwareAddr, vtep net.IP) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: vxlan.Index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, IP: vtep, HardwareAddr: lladdr}
	}
	must(t, h.NeighSet(near(2, mac(2), netlink.NUD_REACHABLE)))
	must(t, h.NeighSet(far(mac(12), ip(2))))
	w := newWatched(t, kit, "")

	neighbour, fdb := Change{NeighbourChanged, index}, Change{FDBChanged, vxlan.Index}
	for _, c := range []struct {
		what string
		near *netlink.Neigh
	}{
		{"a known one is probed", near(2, mac(2), netlink.NUD_STALE)},
		{"a new one", near(3, mac(3), netlink.NUD_REACHABLE)},
		{"the new one is stale", near(3, mac(3), netlink.NUD_STALE)},
		{"a new one in the FDB", far(mac(13), ip(2))},
	} {
		must(t, h.NeighSet(c.near))
		w.silent(c.what)
	}
	for _, c := range []struct {
		what string
		do   func() error
		want Change
	}{
		{"another address", func() error { return h.NeighSet(near(2, mac(4), netlink.NUD_REACHABLE)) }, neighbour},
		{"it has gone", func() error { return h.NeighDel(near(3, nil, 0)) }, neighbour},
		{"it is back", func() error { return h.NeighSet(near(3, mac(3), netlink.NUD_REACHABLE)) }, neighbour},
		{"another VTEP", func() error { return h.NeighSet(far(mac(12), ip(3))) }, fdb},
		{"no VTEP", func() error { return h.NeighDel(far(mac(13), ip(2))) }, fdb},
		{"a device is set up", func() error { return h.LinkSetUp(vxlan) }, Change{LinkChanged, vxlan.Index}},
		{"an address", func() error { kit.Address(t, "flout", "192.0.2.9/32"); return nil }, Change{AddressChanged, index}},
		{"a default route", func() error {
			_, to, _ := net.ParseCIDR("0.0.0.0/0")
			return h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: to})
		}, Change{RouteChanged, index}},
		{"a route of IPv6 to a tunnel", func() error {
			_, to, _ := net.ParseCIDR("2001:db8::/32")
			return h.RouteAdd(&netlink.Route{LinkIndex: vxlan.Index, Dst: to})
		}, Change{RouteChanged, vxlan.Index}},
		{"a rule", func() error {
			rule := netlink.NewRule()
			rule.Table, rule.Priority = 100, 1000
			return h.RuleAdd(rule)
		}, Change{Cause: RouteChanged}},
		{"a qdisc", func() error {
			return h.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: 0xffff0000, Parent: netlink.HANDLE_INGRESS}})
		}, Change{FilterChanged, index}},
		{"a filter", func() error {
			return h.FilterAdd(&netlink.MatchAll{FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: 0xffff0000, Priority: 1, Protocol: unix.ETH_P_ALL},
				Actions: []netlink.Action{&netlink.GenericAction{ActionAttrs: netlink.ActionAttrs{Action: netlink.TC_ACT_OK}}}})
		}, Change{FilterChanged, index}},
	} {
		err := c.do()
		if errors.Is(err, unix.ENOENT) && c.what == "a filter" {
			continue // the kernel has no matchall
		}
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		w.hears(c.what, c.want)
	}
	err = kit.Do(func() error {
		_, anywhere, _ := net.ParseCIDR("192.0.2.0/24")
		return netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: anywhere, Dst: anywhere, Dir: netlink.XFRM_DIR_OUT})
	})
	if !errors.Is(err, unix.EPROTONOSUPPORT) {
		must(t, err)
		w.hears("a policy", Change{Cause: PolicyChanged})
	}
	if _, err := exec.LookPath("nft"); err == nil {
		must(t, kit.Do(func() error { return exec.Command("nft", "add", "table", "ip", "fltest").Run() }))
		w.hears("a table", Change{Cause: NFTChanged})
	}
}

// A namespace that its maker closes is not kept for long.
func TestWatchEnds(t *testing.T) {
	kit := testkit.NetNS(t)
	path := kit.Bind(t)
	w := newWatched(t, kit, path)
	must(t, w.h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flmark"}}))
	testkit.Same(t, "told of a device", LinkChanged, (<-w.told).Cause)
	must(t, unix.Unmount(path, unix.MNT_DETACH))
	w.hears("unmounted", Change{Cause: Gone})
}

// If more messages come than the socket holds, anything may have changed.
func TestWatchOverrun(t *testing.T) {
	kit := testkit.NetNS(t)
	h := kit.Handle(t)
	ifb := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flifb"}}
	must(t, h.LinkAdd(ifb))
	m := NewMonitor()
	told, stop := watching(t, m, open(t, kit.Path), Interest{Causes: paths})
	defer stop()
	s := m.space(kit.Inode)
	s.mu.Lock() // nothing is read meanwhile
	for i := range 20000 {
		must(t, h.NeighSet(&netlink.Neigh{LinkIndex: ifb.Index, State: netlink.NUD_PERMANENT, IP: net.IPv4(192, 0, 2, 2), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)}}))
	}
	s.mu.Unlock()
	hears(t, told, "too many messages", Change{Cause: Overrun})
}

// The memory of neighbours is limited; beyond that, each counts as changed.
func TestReaches(t *testing.T) {
	r := reaches{now: make(map[NeighbourKey]Reach), ever: make(map[whose]bool)}
	at := func(i, device int) NeighbourKey {
		return NeighbourKey{Device: device, Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}
	}
	up := func(mac string) Reach { return Reach{LLAddr: mac} }
	for i, c := range []struct {
		n    Neighbour
		gone bool
		want bool
	}{
		{Neighbour{at(1, 1), Reach{}}, false, false}, // being resolved
		{Neighbour{at(1, 1), up("a")}, false, false}, // for the first time
		{Neighbour{at(1, 1), up("a")}, false, false},
		{Neighbour{at(1, 2), up("a")}, false, true}, // on another device
		{Neighbour{at(1, 2), up("b")}, false, true},
		{Neighbour{at(1, 2), Reach{}}, false, true}, // failed
		{Neighbour{at(1, 2), Reach{}}, true, false}, // which was reported
		{Neighbour{at(2, 1), up("a")}, true, false}, // never known
	} {
		testkit.Same(t, fmt.Sprintf("step %d", i), c.want, r.hear(c.n, c.gone))
	}
	for i := range MostNeighbours + 10 {
		n := Neighbour{at(1000+i, 1), up("a")}
		if r.hear(n, false) && !r.full {
			t.Fatalf("a new one is told, the %dth", i)
		}
	}
	if len(r.now) > MostNeighbours || len(r.ever) > MostNeighbours+1 || !r.full {
		t.Errorf("%d are kept, %d addresses", len(r.now), len(r.ever))
	}
	if !r.hear(Neighbour{at(1<<20, 1), up("a")}, false) {
		t.Error("one that is not kept is not told")
	}
	// Neighbours that come and go do not fill it.
	r = reaches{now: make(map[NeighbourKey]Reach), ever: make(map[whose]bool)}
	for i := range MostNeighbours * 2 {
		n := Neighbour{at(i, 1), up("a")}
		if told := []bool{r.hear(n, false), r.hear(n, true)}; !slices.Equal(told, []bool{false, true}) {
			t.Fatalf("the %dth: %v", i, told)
		}
	}
}

// Routes that a routing daemon changes all the time wake nobody, as the kernel does not queue them.
// Those by a tunnel do, also if it was made later.
func TestRoutesOfOthers(t *testing.T) {
	testkit.OnKernels(t)
	kit := testkit.NetNS(t)
	h := kit.Handle(t)
	must(t, kit.Do(func() error { // a tunnel's own routes come when its address has been tried
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
	}))
	up := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flup", Flags: net.FlagUp}}
	must(t, h.LinkAdd(up))
	m := NewMonitor()
	told, stop := watching(t, m, open(t, kit.Path), Interest{Causes: paths})
	defer stop()
	s := m.space(kit.Inode)
	for round, name := range []string{"fltun1", "fltun2"} {
		tunnel := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}, VxlanId: 1 + round, Port: 8472}
		must(t, h.LinkAdd(tunnel))
		hears(t, told, name, Change{LinkChanged, tunnel.Index})
		_, to, _ := net.ParseCIDR("198.51.100.0/24")
		churn := func(device, n int) {
			for range n {
				r := &netlink.Route{LinkIndex: device, Dst: to, Scope: netlink.SCOPE_LINK}
				must(t, errors.Join(h.RouteAdd(r), h.RouteDel(r)))
			}
		}
		s.mu.Lock() // nothing is read meanwhile
		queued := func() (n int) {
			must(t, s.sockets[routes].conn.Control(func(fd uintptr) {
				for m := make([]byte, 4096); ; n++ {
					if _, _, err := unix.Recvfrom(int(fd), m, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
						return
					}
				}
			}))
			return n
		}
		queued() // of the round before
		churn(up.Index, 1000)
		if n := queued(); n > 0 {
			t.Errorf("%s: %d routes by another device are queued", name, n)
		}
		s.mu.Unlock()
		churn(tunnel.Index, 1)
		for _, c := range hears(t, told, name, Change{RouteChanged, tunnel.Index}) {
			if c == (Change{RouteChanged, up.Index}) {
				t.Errorf("%s: %v is told", name, c)
			}
		}
	}
}
