package netcpu_test

import (
	"net/netip"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A container makes a namespace with a bridge, and a veth that leads there: devices that poll at
// that bridge are not the host's uplinks.
func TestNoUplinksOfAContainer(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	child := h.create(sandbox.Spec{Name: "child"})
	must(t, child.Bridge("br1", netip.Prefix{}))
	h.Wire(
		sandbox.End{Box: child, Name: "c1", Bridge: "br1"},
		sandbox.End{Box: h.box, Name: "eth1", Addr: netip.MustParsePrefix("10.67.0.2/24")})
	h.Wire(
		sandbox.End{Box: h.box, Name: "out0"},
		sandbox.End{Box: child, Name: "port0", Bridge: "br1"})
	there := h.Open(child)
	port := h.Index(child, "port0")
	must(t, there.Offload(port, netdev.GRO).Write(netdev.GRO.On()))

	c := h.container
	c.Interfaces = append(c.Interfaces[:1:1], container.Interface{
		Name: "eth1", Index: h.Index(h.box, "eth1"), Kind: "veth",
		Host: container.HostEnd{NetNS: there.Inode(), NSPath: child.NetNS(), Name: "c1", Index: h.Index(child, "c1"), Master: "br1"},
	})
	lives := h.describe(h.box)
	lives.ID, lives.NetNS, lives.Interfaces = 1, there.Inode(), nil
	for _, is := range []struct {
		what    string
		trusted bool
		lives   bool // another container is in that namespace
		want    string
	}{
		{"found by its processes", false, false, "0"},
		{"mounted where the agent sees it, as a container's are, too", true, true, "0"},
		{"mounted where the agent sees it", true, false, "1"},
	} {
		c.Interfaces[1].Host.Trusted = is.trusted
		if is.lives {
			must(t, h.netcpu.Apply(t.Context(), policy.Target{Container: lives}))
		}
		h.apply(c, policy.NetCPUIsolate)
		if got, err := there.Threaded(port).Read(); err != nil || got != is.want {
			t.Errorf("%s: threaded of the bridge's port is %s (%v), want %s", is.what, got, err, is.want)
		}
		must(t, h.netcpu.Remove(t.Context(), c.ID))
		must(t, h.netcpu.Remove(t.Context(), lives.ID))
	}
}
