package netcpu_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// The host's uplink is a veth without GRO, which does not poll. isolate does the rest, and reports the
// uncovered uplink as long as it does not poll.
func TestUncovered(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	target := h.target(policy.NetCPUIsolate)
	must(t, h.netcpu.Apply(t.Context(), target))
	h.Wire(
		sandbox.End{Box: h.wire, Name: "wire1", Addr: netip.MustParsePrefix("10.77.0.1/24")},
		sandbox.End{Box: h.ns, Name: "nic1", Addr: netip.MustParsePrefix("10.77.0.2/24")})
	ns := h.Open(h.ns)
	gro := ns.Offload(h.Index(h.ns, "nic1"), netdev.GRO)
	must(t, gro.Write(netdev.Off))
	for range 2 { // the same each time
		err := h.netcpu.Apply(t.Context(), target)
		if !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "nic1") || !strings.Contains(err.Error(), "ethtool -K nic1 gro on") {
			t.Errorf("%v", err)
		}
	}
	if len(h.notes()) == 0 {
		t.Error("it is not isolated at all")
	}
	must(t, gro.Write(netdev.GRO.On()))
	must(t, h.netcpu.Apply(t.Context(), target))
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}
