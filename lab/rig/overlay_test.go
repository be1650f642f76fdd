package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// overlay builds an overlay that is closed with the test.
func overlay(t *testing.T, path Path) *Overlay {
	t.Helper()
	testkit.NeedRoot(t)
	o, err := NewOverlay(t.Context(), path)
	must(t, err)
	t.Cleanup(func() {
		testkit.Check(t, o.Close())
		for _, r := range o.Hosts {
			testkit.Fails(t, fmt.Sprintf("%s is left", r.Sandboxes.Dir()), testkit.Err(os.Stat(r.Sandboxes.Dir())))
		}
	})
	return o
}

// sent returns how many packets a device has sent.
func sent(t *testing.T, b *sandbox.Box, dev string) (n uint64) {
	t.Helper()
	if err := b.Change(dev, func(_ *netlink.Handle, link netlink.Link) error {
		n = link.Attrs().Statistics.TxPackets
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestOverlay sends requests from container to container, which pass the tunnel, and from host to
// host, which do not.
func TestOverlay(t *testing.T) {
	for path, tunnel := range map[Path]string{Routed: RoutedTunnel, Bridged: BridgedTunnel} {
		t.Run(string(path), func(t *testing.T) {
			o := overlay(t, path)
			for _, c := range []struct {
				name           string
				client, server *sandbox.Box
				at             string
				encapsulated   bool
			}{
				{"containers", o.Hosts[0].Boxes[0], o.Hosts[1].Boxes[0], o.Addrs[1], true},
				{"hosts", o.Hosts[0].Node, o.Hosts[1].Node, HostAddr(1), false},
			} {
				const count = 20
				var before [2]uint64
				for host, b := range o.Tunnels {
					before[host] = sent(t, b, tunnel)
				}
				testkit.Must(t, testkit.Err(o.Hosts[1].Start(t.Context(), c.server, "rr-server", "--proto", "tcp")))
				client, err := o.Hosts[0].Start(t.Context(), c.client, "rr-client", "--proto", "tcp", "--size", "1", "--to", fmt.Sprintf("%s:%s", c.at, Port))
				must(t, err)
				for first := client.Read(); client.Read().Since(first).Ops < count; {
					if !moves(client) {
						t.Fatalf("%s: no answer comes", c.name)
					}
				}
				for host, b := range o.Tunnels {
					if n := sent(t, b, tunnel) - before[host]; c.encapsulated != (n >= count) { // a connection may still end
						t.Errorf("%s: tunnel of host %d sent %d packets", c.name, host, n)
					}
				}
				testkit.Check(t, client.Stop())
			}
		})
	}
}

// TestSwarm sends requests between containers of two Docker Engines. The namespace of their overlay
// network is mounted here, as an agent of the machine would see it.
func TestSwarm(t *testing.T) {
	testkit.Later(t)
	needEngine(t)
	o := overlay(t, Swarm)
	for host, r := range o.Hosts {
		ns, err := netdev.Open(filepath.Join(r.temp[len(r.temp)-1], tunnelNetNS))
		must(t, err)
		links, err := ns.Links(netdev.MostLinks)
		ns.Close()
		if err != nil || !slices.ContainsFunc(links, func(l netdev.Link) bool { return l.Kind == "vxlan" }) {
			t.Errorf("host %d: there is no tunnel in the overlay's namespace: %+v, %v", host, links, err)
		}
	}
	testkit.Must(t, testkit.Err(o.Hosts[1].Start(t.Context(), o.Hosts[1].Boxes[0], "rr-server", "--proto", "tcp")))
	client, err := o.Hosts[0].Start(t.Context(), o.Hosts[0].Boxes[0], "rr-client", "--proto", "tcp", "--size", "1", "--to", fmt.Sprintf("%s:%s", o.Addrs[1], Port))
	must(t, err)
	if !moves(client) {
		t.Error("no answer comes")
	}
}
