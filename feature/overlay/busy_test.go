package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// On a busy host flows stay fast. Changes beside their path invalidate nothing, and changes that a
// neighbour can cause on their path do so at most once a second.
func TestBusyHost(t *testing.T) {
	testkit.Later(t)
	t.Parallel()
	for _, form := range testkit.Cases(t, 1, routed, apart) {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, form)
			r.on()
			newSink(t, r.nodes[1].web)
			s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
			n := r.nodes[0]
			must(t, n.inside.Bridge("br1", netip.MustParsePrefix("10.9.0.1/24")))
			beside := r.Create(sandbox.Spec{Name: "beside"})
			r.Wire(sandbox.End{Box: n.inside, Name: "vo", Bridge: "br1"}, sandbox.End{Box: beside, Name: "eth0", Addr: netip.MustParsePrefix("10.9.0.2/24")})
			near := r.Create(sandbox.Spec{Name: "near"})
			c := r.join(n, near, "vg", "", "10.244.0.7", "fd00:244::7")
			must(t, n.applyTo(t, c, true))
			r.quick(s)
			r.quick(newStream(t, near, r.nodes[1].addr)) // each of several containers is fast
			for _, x := range []struct {
				name   string
				do     func(i int)
				beside bool
			}{
				{"containers on another bridge", func(int) { r.churn(n, "br1") }, true},
				{"ARP on another bridge", r.flaps(n, beside, "br1", "10.9.0.2"), true},
				{"a container that joins", func(i int) { must(t, n.applyTo(t, c, i%2 == 0)) }, true},
				{"containers on the same bridge", func(int) { r.churn(n, "br0") }, false},
				{"ARP on the same bridge", r.flaps(n, near, "br0", "10.244.0.7"), false},
				{"rules of netfilter", func(int) {
					n.nft(t, "table inet fl_busy { chain f { type filter hook forward priority 0; udp dport 1 drop; }; }; delete table inet fl_busy")
				}, false},
			} {
				t.Run(x.name, func(t *testing.T) {
					r.T = t
					r.quick(s)
					testkit.Await(t, "no change of before is due", func() bool { return n.idle(netdev.NeighbourChanged) })
					// Neighbours of the way change by themselves now and then.
					began := time.Now()
					gen, itself := n.generation(netdev.NeighbourChanged)
					before := n.report(t)
					for i := 0; time.Since(began) < 3*raiseEvery/2; i++ {
						x.do(i)
						for at := time.Now(); time.Since(at) < 100*time.Millisecond; {
							s.calls(t)
						}
					}
					now, again := n.generation(netdev.NeighbourChanged)
					most := uint32(time.Since(began)/time.Second) + 1
					if others := now - gen - uint32(again-itself); now > gen+most || x.beside && others > 1 {
						t.Errorf("all was invalidated %d times, %d of them not by a neighbour", now-gen, others)
					}
					after := n.report(t)
					fast, slow := after.Egress.Fast-before.Egress.Fast, after.Egress.Slow-before.Egress.Slow
					t.Logf("%d of %d packets were fast: %.3f; %v, was %v", fast, fast+slow, float64(fast)/float64(fast+slow), after.Evictions, before.Evictions)
				})
			}
		})
	}
}

// churn makes the host end of a container that comes, and goes.
func (r *rig) churn(n *node, bridge string) {
	r.T.Helper()
	r.Netlink(n.inside, func(h *netlink.Handle) error {
		at := netlink.NewLinkAttrs()
		at.Name, at.MasterIndex, at.Flags = "vc", r.Index(n.inside, bridge), unix.IFF_UP
		l := &netlink.Veth{LinkAttrs: at, PeerName: "vd"}
		return errors.Join(h.LinkAdd(l), h.LinkDel(l))
	})
}

// flaps returns what announces an address from a box with two MAC addresses, in turn.
func (r *rig) flaps(n *node, from *sandbox.Box, bridge, addr string) func(int) {
	index, ip := r.Index(from, "eth0"), netip.MustParseAddr(addr).As4()
	r.Netlink(n.inside, func(h *netlink.Handle) error {
		return h.NeighSet(&netlink.Neigh{LinkIndex: r.Index(n.inside, bridge), State: netlink.NUD_REACHABLE, IP: ip[:], HardwareAddr: mac(r.MAC(from, "eth0"))})
	})
	return func(int) {
		r.T.Helper()
		must(r.T, from.Do(func() error {
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			for i := range 50 {
				who := [6]byte{2, 9, 9, 9, 9, byte(i)}
				// A request of ARP.
				frame := slices.Concat(bytes.Repeat([]byte{255}, 6), who[:], []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, who[:], ip[:], make([]byte, 6), ip[:])
				if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
					return fmt.Errorf("announce %s: %w", addr, err)
				}
			}
			return nil
		}))
	}
}
