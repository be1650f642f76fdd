package overlay

import (
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
)

// kit joins the container of a node to the bridge by a netkit in mode l2.
func (r *rig) kit(n *node) {
	t := r.T
	t.Helper()
	web, err := os.Open(n.web.NetNS())
	must(t, err)
	defer web.Close()
	pair := &netlink.Netkit{
		LinkAttrs: netlink.LinkAttrs{Name: "veth0"}, Mode: netlink.NETKIT_MODE_L2, Policy: netlink.NETKIT_POLICY_FORWARD, PeerPolicy: netlink.NETKIT_POLICY_FORWARD,
	}
	pair.SetPeerAttrs(&netlink.LinkAttrs{Name: "eth0", Namespace: netlink.NsFd(int(web.Fd()))})
	err = n.inside.Netlink(func(h *netlink.Handle) error { return h.LinkAdd(pair) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		testkit.Skip(t, "kernel has no netkit (6.7)")
	}
	must(t, err)
	r.Change(n.inside, "veth0", func(h *netlink.Handle, l netlink.Link) error {
		br, err := h.LinkByName("br0")
		if err != nil {
			return err
		}
		return errors.Join(h.LinkSetMaster(l, br), h.LinkSetUp(l))
	})
	r.Change(n.web, "eth0", func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetUp(l) })
	r.Address(n.web, "eth0", n.addr+"/24")
}

// Containers with a netkit are fast, too.
func TestNetkit(t *testing.T) {
	testkit.OnKernels(t)
	r := makeRig(&rig{Host: topology.New(t), form: routed, netkit: true})
	r.on()
	echo(t, r.nodes[1].web)
	for _, proto := range []string{"udp", "tcp"} {
		r.fast(dial(t, r.nodes[0].web, proto, r.nodes[1].addr), 100)
	}
}
