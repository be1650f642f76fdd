package overlay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}

// The forms of an overlay.
const (
	routed  = "routed"  // like Flannel: the tunnel device has the route to the other node
	bridged = "bridged" // the tunnel device is a port of the bridge
	apart   = "apart"   // that, in a namespace of their own, like Docker Swarm
)

// node is a host with one container on the overlay.
type node struct {
	n      int
	tag    string       // in its sandboxes' names, if two nodes have the same number
	host   *sandbox.Box // with the uplink nic0, 10.66.0.N
	inside *sandbox.Box // with the bridge and the tunnel device vx0
	web    *sandbox.Box
	boxes  []*sandbox.Box // of its containers: web and its guests
	c      container.Container
	f      *Overlay
	j      *journal.Journal
	addr   string // of the container
	addr6  string
}

// rig is two nodes joined by a wire.
type rig struct {
	*topology.Host
	form   string
	netkit bool // the containers have netkit devices
	calico bool // they are joined as Calico does it: routed
	nodes  [2]*node
}

var must = testkit.Must

// newRig makes two nodes, with idle features.
func newRig(t *testing.T, form string) *rig {
	t.Helper()
	return makeRig(&rig{Host: topology.New(t), form: form})
}

func makeRig(r *rig) *rig {
	t := r.T
	t.Helper()
	for i := range r.nodes {
		n := &node{n: i, host: r.Create(sandbox.Spec{Name: fmt.Sprint("host", i), Bare: true})}
		n.inside = n.host
		if r.form == apart {
			n.inside = r.Create(sandbox.Spec{Name: fmt.Sprint("in"+n.tag, i), Bare: true})
		}
		r.nodes[i] = n
		// Duplicate address detection delays addresses, which are changes.
		must(t, n.host.Sysctl("ipv6/conf/default/accept_dad", "0"))
		must(t, n.inside.Sysctl("ipv6/conf/default/accept_dad", "0"))
	}
	r.Wire(
		sandbox.End{Box: r.nodes[0].host, Name: "nic0", Addr: netip.MustParsePrefix("10.66.0.1/24")},
		sandbox.End{Box: r.nodes[1].host, Name: "nic0", Addr: netip.MustParsePrefix("10.66.0.2/24")})
	for _, n := range r.nodes {
		r.overlay(n)
	}
	for i, n := range r.nodes {
		r.peer(n, r.nodes[1-i])
		r.feature(n)
	}
	return r
}

// overlay makes bridge, tunnel device and container of a node.
func (r *rig) overlay(n *node) {
	t := r.T
	t.Helper()
	switch r.form {
	case routed:
		must(t, n.inside.Bridge("br0", netip.MustParsePrefix(fmt.Sprintf("10.244.%d.1/24", n.n))))
		r.Address(n.inside, "br0", fmt.Sprintf("fd00:244:%d::1/64", n.n))
		n.addr, n.addr6 = fmt.Sprintf("10.244.%d.2", n.n), fmt.Sprintf("fd00:244:%d::2", n.n)
		must(t, n.inside.Sysctl("ipv4/ip_forward", "1"))
		must(t, n.inside.Sysctl("ipv6/conf/all/forwarding", "1"))
	default:
		must(t, n.inside.Bridge("br0", netip.Prefix{}))
		n.addr, n.addr6 = fmt.Sprintf("10.244.0.%d", n.n+2), fmt.Sprintf("fd00:244::%d", n.n+2)
	}
	r.tunnel(n, 8472)
	n.web = r.Create(sandbox.Spec{Name: fmt.Sprint("web"+n.tag, n.n)})
	n.c = r.join(n, n.web, "veth0", "", n.addr, n.addr6)
}

// join connects a container to the overlay, with a given MAC address or the kernel's, and describes
// it.
func (r *rig) join(n *node, b *sandbox.Box, hostEnd, mac string, addr, addr6 string) container.Container {
	r.T.Helper()
	must(r.T, b.Sysctl("ipv6/conf/default/accept_dad", "0"))
	gateway := fmt.Sprintf("10.244.%d.1", n.n)
	switch {
	case r.netkit:
		r.kit(n)
	case r.calico:
		gateway = r.endpoint(n, b, hostEnd, addr)
	default:
		r.Wire(sandbox.End{Box: n.inside, Name: hostEnd, Bridge: "br0"},
			sandbox.End{Box: b, Name: "eth0", MAC: mac, Addr: netip.MustParsePrefix(addr + "/24")})
	}
	r.Address(b, "eth0", addr6+"/64")
	r.Change(b, "eth0", func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetMTU(l, 1450) })
	if r.form == routed {
		r.Route(b, "0.0.0.0/0", gateway)
		r.Route(b, "::/0", fmt.Sprintf("fd00:244:%d::1", n.n))
	}
	n.boxes = append(n.boxes, b)
	c := r.Describe(b)
	dev := r.Veth(b, "eth0", n.inside, hostEnd)
	if r.netkit {
		dev.Kind = "netkit"
	}
	dev.MAC, dev.Addrs = r.MAC(b, "eth0"), []string{addr + "/24", addr6 + "/64"}
	c.Interfaces = []container.Interface{dev}
	return c
}

// tunnel makes the tunnel device of a node.
func (r *rig) tunnel(n *node, port int) {
	r.T.Helper()
	end := sandbox.End{Box: n.inside, Name: "vx0"}
	if r.form == routed {
		end.Addr = netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/32", n.n))
	} else {
		end.Bridge = "br0"
	}
	must(r.T, n.host.Add(&netlink.Vxlan{
		LinkAttrs: netlink.NewLinkAttrs(), VxlanId: 42, Port: port, SrcAddr: net.ParseIP(fmt.Sprintf("10.66.0.%d", n.n+1)),
	}, end))
}

// peer configures a node to reach the containers of another.
func (r *rig) peer(n, other *node) {
	r.T.Helper()
	r.reach(n, other.n, mac(r.MAC(other.inside, "vx0")), mac(r.MAC(other.web, "eth0")))
}

// reach configures the MACs of another node's tunnel device and container.
func (r *rig) reach(n *node, other int, mac, to net.HardwareAddr) {
	t := r.T
	t.Helper()
	vtep := net.ParseIP(fmt.Sprintf("10.66.0.%d", other+1))
	index := r.Index(n.inside, "vx0")
	r.Netlink(n.inside, func(h *netlink.Handle) error {
		fdb := netlink.Neigh{LinkIndex: index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF, IP: vtep, HardwareAddr: mac}
		if r.form != routed {
			fdb.HardwareAddr = make(net.HardwareAddr, 6) // the default entry: the kernel learns the rest
			far := fdb
			far.HardwareAddr = to
			return errors.Join(h.NeighAppend(&fdb), h.NeighSet(&far))
		}
		if err := h.NeighSet(&fdb); err != nil {
			return err
		}
		for _, gw := range []string{fmt.Sprintf("10.244.%d.0", other), fmt.Sprintf("fd00:244:%d::", other)} {
			if err := h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(gw), HardwareAddr: mac}); err != nil {
				return err
			}
			bits := "/24"
			if strings.Contains(gw, ":") {
				bits = "/64"
			}
			_, dst, err := net.ParseCIDR(gw + bits)
			if err != nil {
				return err
			}
			if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: dst, Gw: net.ParseIP(gw), Flags: int(netlink.FLAG_ONLINK)}); err != nil {
				return fmt.Errorf("route %s: %w", dst, err)
			}
		}
		return nil
	})
}

// feature makes the feature of a node.
func (r *rig) feature(n *node) {
	t := r.T
	t.Helper()
	n.j = testkit.Journal(t, journal.Open)
	n.begin(t, "")
}

// begin makes a node's feature, which knows the networks that were stopped by hand from a file.
func (n *node) begin(t testing.TB, killed string) {
	t.Helper()
	who, err := identity.Open("/proc")
	must(t, err)
	t.Cleanup(func() { must(t, who.Close()) })
	f, err := New(Config{
		Host:   feature.Host{Roots: kernel.Roots{Proc: "/proc", Sys: "/sys", Cgroup: "/sys/fs/cgroup"}, Journal: n.j, Identity: who, Ends: hook.Open("/proc", n.j), NetNS: n.host.NetNS()},
		Killed: killed,
	})
	must(t, err)
	t.Cleanup(func() { must(t, f.Close()) })
	n.f = f
}

func (n *node) apply(t testing.TB, on bool) error {
	t.Helper()
	return n.applyTo(t, n.c, on)
}

func (n *node) applyTo(t testing.TB, c container.Container, on bool) error {
	t.Helper()
	return n.f.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{Overlay: &on}})
}

// on enables the fast path at both nodes.
func (r *rig) on() {
	r.T.Helper()
	for _, n := range r.nodes {
		must(r.T, n.apply(r.T, true))
	}
}

// onTracked is on where routed nodes track connections.
func (r *rig) onTracked() {
	r.T.Helper()
	for _, n := range r.nodes {
		if r.form == routed {
			n.stateful(r.T)
		}
	}
	r.on()
}

// stateful makes a node track connections, and accept established ones. A guest has no nft: nothing
// is tracked there.
func (n *node) stateful(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Log(err)
		return
	}
	n.nft(t, `table inet fl_test { chain forward { type filter hook forward priority 0; ct state established,related accept; ct state invalid drop; }; }`)
}

func (n *node) nft(t testing.TB, rules string) {
	t.Helper()
	n.run(t, "nft", rules)
}

// report returns a node's report on the one network.
func (n *node) report(t testing.TB) api.OverlayNetwork {
	t.Helper()
	r, err := n.f.Report(t.Context(), nil, api.Ask{Feature: "overlay", Body: api.OverlayAsk{}})
	must(t, err)
	o := r.(api.Overlay)
	if len(o.Networks) != 1 {
		t.Fatalf("%d networks: %+v", len(o.Networks), o)
	}
	return o.Networks[0]
}

// echo answers in a box at port 9001, by TCP and, as a sink, UDP, until the test ends.
func echo(t testing.TB, b *sandbox.Box) *sink {
	t.Helper()
	datagrams := newSink(t, b)
	must(t, b.Do(func() error { return testkit.Serve(t, ":9001", func(c net.Conn) io.Writer { return c }) }))
	return datagrams
}

// dialogue is a connection to an echo.
type dialogue struct {
	net.Conn
	n int
}

func dial(t testing.TB, b *sandbox.Box, proto, to string) *dialogue {
	t.Helper()
	return dialAt(t, b, proto, net.JoinHostPort(to, "9001"))
}

func dialAt(t testing.TB, b *sandbox.Box, proto, to string) *dialogue {
	t.Helper()
	var c net.Conn
	must(t, b.Do(func() (err error) {
		c, err = net.DialTimeout(proto, to, 5*time.Second)
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return &dialogue{Conn: c}
}

// ask sends bytes and waits until the same come back.
func (d *dialogue) ask(t testing.TB, size int) {
	t.Helper()
	d.n++
	send, got := make([]byte, size), make([]byte, size)
	for i := range send {
		send[i] = byte(i + d.n)
	}
	must(t, d.SetDeadline(time.Now().Add(10*time.Second)))
	_, err := d.Write(send)
	must(t, err)
	_, err = io.ReadFull(d, got)
	must(t, err)
	if string(got) != string(send) {
		t.Fatalf("other bytes came back")
	}
}

// fast asks until packets of both directions are fast at both nodes.
func (r *rig) fast(d *dialogue, size int) {
	r.T.Helper()
	r.fastBy(func() { r.T.Helper(); d.ask(r.T, size) })
}

// fastBy calls ask, which sends a packet each way, until nearly all of them are fast. A guest may stall
// for longer than any timeout, so the number of attempts counts, too.
func (r *rig) fastBy(ask func()) {
	t := r.T
	t.Helper()
	var now [2]api.OverlayNetwork
	end := time.Now().Add(20 * time.Second)
	for tries := 1; ; tries++ {
		var before [2]api.OverlayNetwork
		var device [2]netdev.Counters
		for i, n := range r.nodes {
			device[i], before[i] = r.devices(n), n.report(t)
		}
		for range 20 {
			ask()
		}
		all := true
		for i, n := range r.nodes {
			now[i] = n.report(t)
			all = all && now[i].Egress.Fast >= before[i].Egress.Fast+15 && now[i].Ingress.Fast >= before[i].Ingress.Fast+15
			c := r.devices(n)
			if sent, received := now[i].Egress.Fast-before[i].Egress.Fast, now[i].Ingress.Fast-before[i].Ingress.Fast; c.TxPackets-device[i].TxPackets < sent || c.RxPackets-device[i].RxPackets < received {
				t.Errorf("%d packets were sent and %d received fast, and its containers' devices counted %+v, then %+v", sent, received, device[i], c)
			}
		}
		if all {
			return
		}
		if tries >= 20 && time.Now().After(end) {
			t.Fatalf("it is not fast:\n%+v\n%+v", now[0], now[1])
		}
	}
}

// devices returns the counters of a node's container devices, which traffic's metrics show: fast
// packets count there too.
func (r *rig) devices(n *node) (sum netdev.Counters) {
	r.T.Helper()
	for _, b := range n.boxes {
		c := r.counters(b, "eth0")
		sum.RxPackets += c.RxPackets
		sum.TxPackets += c.TxPackets
	}
	return sum
}

func (r *rig) counters(b *sandbox.Box, dev string) netdev.Counters {
	r.T.Helper()
	all, err := r.Open(b).AllCounters(netdev.MostLinks)
	must(r.T, err)
	return all[r.Index(b, dev)]
}

// takesOff reports whether the kernel lets a program remove outer headers of another family than
// the inner ones.
func takesOff(t testing.TB) bool {
	var u unix.Utsname
	must(t, unix.Uname(&u))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	must(t, err)
	return major > 6 || major == 6 && minor >= 3
}

// Packets of established flows are fast, in each form and family, and arrive as sent.
func TestFast(t *testing.T) {
	testkit.Smoke(t)
	for _, form := range testkit.Cases(t, 1, routed, bridged, apart) {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			r.onTracked()
			echo(t, r.nodes[1].web)
			r.fastTo(t, r.nodes[1].addr, r.nodes[1].addr6, "9001")
		})
	}
}

// fastTo makes flows from node 0 to an address of each family fast.
func (r *rig) fastTo(t *testing.T, addr, addr6, port string) {
	for _, proto := range []string{"udp", "tcp"} {
		for _, to := range []string{addr, addr6} {
			for _, size := range []int{1, 1200, 60000} {
				if proto == "udp" && size > 1200 {
					continue
				}
				t.Run(fmt.Sprintf("%s %s %d", proto, to, size), func(t *testing.T) {
					r.T = t
					if to == addr6 && !takesOff(t) {
						testkit.Skip(t, "kernel cannot take IPv4 off IPv6 (6.3)")
					}
					r.fast(dialAt(t, r.nodes[0].web, proto, net.JoinHostPort(to, port)), size)
					if proto == "udp" { // an acknowledgement could be under way
						r.sums()
					}
				})
			}
		}
	}
	r.T = t
}

// sums checks that a network's fast bytes are the sum of its containers' bytes: neither includes the
// outer headers.
func (r *rig) sums() {
	r.T.Helper()
	for _, n := range r.nodes {
		sums := make(map[string]float64)
		for _, s := range n.f.Snapshot().Samples {
			if strings.HasSuffix(s.Name, "bytes_total") && s.Labels[1].Value == "fast" {
				sums[s.Name+" "+s.Labels[0].Value] += s.Value
			}
		}
		for _, direction := range []string{"egress", "ingress"} {
			all, each := sums["overlay_bytes_total "+direction], sums["overlay_container_bytes_total "+direction]
			if all == 0 || all != each {
				r.T.Errorf("%v fast bytes of %s, and %v of the containers", all, direction, each)
			}
		}
	}
}
