package overlay

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Changes come, and are undone, in any order: while a change that the feature has followed denies a
// flow, no packet is delivered, and once none does the flow goes on.
func TestRandomChanges(t *testing.T) {
	testkit.InFull(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, form := range testkit.Cases(t, 1, routed, bridged, apart) {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			if form == routed {
				for _, n := range r.nodes {
					n.stateful(t)
				}
			}
			r.on()
			to := newSink(t, r.nodes[1].web)
			s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
			s.size = 1350
			r.resolved()
			r.quick(s)
			var list []denial
			for _, d := range denials() {
				if d.told != "" && (d.form == "" || d.form == form) {
					list = append(list, d)
				}
			}
			active := make(map[int]bool)
			var denied [][2]uint64
			turn := func(i int) {
				d, n := list[i], r.nodes[list[i].at]
				t.Logf("after %d datagrams: %s, undone: %t", s.sent, d.name, active[i])
				change := d.do
				if active[i] {
					change = d.undo
				}
				if gen, _ := n.generation(); gen == 0 && !(active[i] && refuses(d)) {
					change(r, n) // the network is left alone meanwhile: nothing is fast
				} else {
					n.told(t, d.told, func() { change(r, n) })
				}
				if active[i] = !active[i]; !active[i] {
					delete(active, i)
				}
			}
			for range testkit.Scale(t, 8, 700) {
				i := random.IntN(len(list))
				turn(i)
				if len(active) == 0 {
					s.calls(t)
					continue
				}
				first := s.sent + 1
				for range 5 {
					s.push()
				}
				s.call(5 * time.Millisecond)
				denied = append(denied, [2]uint64{first, s.sent})
			}
			for i := range list {
				if active[i] {
					turn(i)
				}
			}
			r.T = t
			r.quick(s)
			for _, number := range to.of(s) {
				for _, d := range denied {
					if number >= d[0] && number <= d[1] {
						t.Errorf("datagram %d was delivered; denied were %d to %d", number, d[0], d[1])
					}
				}
			}
		})
	}
}

// refuses reports whether a network is left alone for as long as a change lasts.
func refuses(d denial) bool { return d.name == "filter at the tunnel device" }

// resolved sets permanent neighbours for all containers: packets that wait for ARP would be
// delivered once the answer passes.
func (r *rig) resolved() {
	r.T.Helper()
	for i, n := range r.nodes {
		if r.form != routed {
			must(r.T, n.web.Neighbour("eth0", netip.MustParseAddr(r.nodes[1-i].addr), r.MAC(r.nodes[1-i].web, "eth0")))
			continue
		}
		must(r.T, n.web.Neighbour("eth0", netip.MustParseAddr(fmt.Sprintf("10.244.%d.1", i)), r.MAC(n.inside, "br0")))
		must(r.T, n.inside.Neighbour("br0", netip.MustParseAddr(n.addr), r.MAC(n.web, "eth0")))
	}
}
