package traffic_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// An uplink's MTU is raised while packets are cut: full frames pass before the next round, and also
// if that round refuses the latency.
func TestSplitMTU(t *testing.T) {
	testkit.InFull(t)
	testSplitMTU(t, traffic.Egress)
}

// The same for what it receives.
func TestIngressSplitMTU(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	testSplitMTU(t, traffic.Ingress)
}

func testSplitMTU(t *testing.T, way traffic.Direction) {
	const refused = 20_000
	for _, mtu := range []int{5000, refused} {
		t.Run(fmt.Sprint(mtu), func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			x, y, to := h.two("host")
			from, at, dev := x.box, h.wire, "nic0"
			apply := h.apply
			if way == traffic.Ingress {
				from, at, to, dev = h.wire, x.box, "10.66.0.254", netdev.IFBName(h.nic0)
				apply = func(c container.Container, n policy.Net) error { return h.due(c, policy.Net{}, n) }
			}
			must(t, apply(x.c, policy.Net{Weight: 1}))
			must(t, apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
			h.run(at, "udp-recv", "--listen", ":9002")
			h.run(from, "udp-send", "--rate", "2000", "--size", "4000", "--to", to+":9002")
			longest := h.longest(h.ns, h.Index(h.ns, dev))
			super(t, longest, false, "fragments")
			for _, d := range []struct {
				at  *sandbox.Box
				dev string
			}{{h.wire, "wire"}, {h.ns, "nic0"}} {
				h.Change(d.at, d.dev, func(n *netlink.Handle, l netlink.Link) error {
					return n.LinkSetMTU(l, mtu)
				})
			}
			if mtu == refused {
				if err := apply(x.c, policy.Net{Weight: 1}); !errors.Is(err, model.ErrInfeasible) {
					t.Errorf("a latency that frames are too long for: %v", err)
				}
			}
			super(t, longest, true, "the MTU is raised")
		})
	}
}
