package overlay

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// TestChanged changes the contents of learnt headers. The flow goes on, and its packets are fast
// again, with the new headers.
func TestChanged(t *testing.T) {
	testkit.InFull(t)
	for _, form := range testkit.Cases(t, 1, routed, bridged, apart) {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			r.on()
			newSink(t, r.nodes[1].web)
			s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
			mac := net.HardwareAddr{2, 0, 0, 0, 0, 9}
			for _, c := range []struct {
				name string
				do   func()
				has  []byte // in the headers to the other node
			}{
				{"uplink's MAC address of the other node", func() {
					r.nodes[1].told(r.T, netdev.LinkChanged, func() {
						r.Change(r.nodes[1].host, "nic0", func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetHardwareAddr(l, mac) })
					})
					r.nodes[0].told(r.T, netdev.NeighbourChanged, func() {
						index := r.Index(r.nodes[0].host, "nic0")
						r.Netlink(r.nodes[0].host, func(h *netlink.Handle) error {
							return h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_REACHABLE, IP: net.IPv4(10, 66, 0, 2), HardwareAddr: mac})
						})
					})
				}, mac},
				{"port of the tunnel", func() {
					for _, n := range r.nodes {
						must(r.T, n.inside.Delete("vx0"))
						r.tunnel(n, 8473)
					}
					for i, n := range r.nodes {
						r.peer(n, r.nodes[1-i])
					}
				}, []byte{8473 >> 8, 8473 & 0xff}},
			} {
				t.Run(c.name, func(t *testing.T) {
					r.T = t
					r.quick(s)
					c.do()
					r.quick(s)
					eventually(t, "the headers are not those of now", func() bool {
						return s.call(100*time.Millisecond) && bytes.Contains(r.nodes[0].headers(t), c.has)
					})
				})
			}
		})
	}
}

// headers returns those for the one other container that a node knows; nil: none.
func (n *node) headers(t testing.TB) []byte {
	t.Helper()
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	var key overlayHostKey
	var value overlayRemote
	it := n.f.cache.maps.FlOvRemotes.Iterate()
	for it.Next(&key, &value) {
		for _, o := range n.f.force {
			if o.number == key.Net && o.value.Gen == value.Gen {
				return value.Headers[:value.Bytes]
			}
		}
	}
	must(t, it.Err())
	return nil
}
