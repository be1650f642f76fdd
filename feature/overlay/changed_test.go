package overlay

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// If a route has several next hops, a flow's packets leave by the one that the kernel takes, and may
// arrive by any.
func TestNextHops(t *testing.T) {
	t.Parallel()
	r := newRig(t, routed)
	r.Wire(
		sandbox.End{Box: r.nodes[0].host, Name: "nic1", Addr: netip.MustParsePrefix("10.67.0.1/24")},
		sandbox.End{Box: r.nodes[1].host, Name: "nic1", Addr: netip.MustParsePrefix("10.67.0.2/24")})
	var by [2]string
	for i, n := range r.nodes {
		// The kernel prefers the next hop whose device has the source address.
		r.Change(n.host, "nic0", func(h *netlink.Handle, l netlink.Link) error {
			return h.AddrDel(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 66, 0, byte(1+i)), Mask: net.CIDRMask(24, 32)}})
		})
		r.Address(n.host, "lo", fmt.Sprintf("10.66.0.%d/32", 1+i))
		r.Address(n.host, "nic0", fmt.Sprintf("10.65.0.%d/24", 1+i))
		for _, at := range []string{"all", "nic0", "nic1"} {
			must(t, n.host.Sysctl("ipv4/conf/"+at+"/rp_filter", "0"))
		}
		by[i] = []string{"nic0", "nic1"}[i] // most of the weight
		weights := [2]int{}
		weights[i] = 255
		r.Netlink(n.host, func(h *netlink.Handle) error {
			return h.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 66, 0, byte(2-i)), Mask: net.CIDRMask(32, 32)}, MultiPath: []*netlink.NexthopInfo{
				{LinkIndex: r.Index(n.host, "nic0"), Hops: weights[0], Gw: net.IPv4(10, 65, 0, byte(2-i))},
				{LinkIndex: r.Index(n.host, "nic1"), Hops: weights[1], Gw: net.IPv4(10, 67, 0, byte(2-i))},
			}})
		})
	}
	r.on()
	newSink(t, r.nodes[1].web)
	s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
	r.quick(s)
	for range 100 {
		s.calls(t)
	}
	for i, n := range r.nodes {
		if c := r.counters(n.host, by[i]); c.TxPackets < 100 {
			t.Errorf("node %d has sent %d packets by %s", i, c.TxPackets, by[i])
		}
	}
}

// A packet that is longer than the route, or the path, lets through is cut as without the fast path.
func TestRouteMTU(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"route", "path"} {
		t.Run(how, func(t *testing.T) {
			r, list := twins(t, routed)
			for _, w := range list {
				for _, d := range []struct {
					box  *sandbox.Box
					name string
				}{{w.host, "nic0"}, {w.far, "far0"}, {w.host, "vx0"}, {w.host, "br0"}, {w.host, "veth0"}, {w.web, "eth0"}} {
					r.Change(d.box, d.name, func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetMTU(l, 8000) })
				}
				if how == "route" {
					r.Netlink(w.host, func(h *netlink.Handle) error {
						return h.RouteAdd(&netlink.Route{LinkIndex: r.Index(w.host, "nic0"), Dst: &net.IPNet{IP: net.IPv4(10, 66, 0, 1), Mask: net.CIDRMask(32, 32)}, MTU: 1500})
					})
				}
			}
			must(t, list[0].apply(t, true))
			var s shape
			var n uint64
			pinned(t, func() {
				if how == "path" {
					accelerate(t, s, list, &n)
					for _, w := range list {
						near, far := s.nodes()
						sent := s.encapsulated(farNIC, nearNIC, near, far, s.sent(nil))
						tooLong := append([]byte{3, 4, 0, 0, 0, 0, 1500 >> 8, 1500 & 0xff}, sent[14:14+48]...)
						put16(tooLong[2:], ^folded(tooLong, 0))
						p := s.frame(nearNIC, farNIC, datagram(far, near, 1, tooLong), false)
						sumHeader(p[14:], false)
						inject(t, w.wire, p)
					}
				}
				cut := func(w *twin) (long, whole int) {
					n++
					mark := payload(n, 21)
					for range 10 {
						must(t, unix.Sendto(w.socket, random(4000), 0, &unix.SockaddrInet6{Port: farPort, Addr: s.far().As16()}))
					}
					inject(t, w.inside, s.from(nearPort+1, mark))
					for _, b := range until(t, w.wire, mark) {
						if len(b) > 1514 {
							long++
						} else if len(b) > 1400 {
							whole++
						}
					}
					return long, whole
				}
				_, want := cut(list[1])
				for began := time.Now(); time.Since(began) < 3*lease; {
					accelerate(t, s, list, &n)
					known := time.Since(began) > lease+coarse
					if long, whole := cut(list[0]); known && (long > 0 || whole != want || want < 20) {
						t.Fatalf("%d packets are longer than the way takes, %d are whole, without the fast path %d", long, whole, want)
					}
				}
			})
		})
	}
}
