package netcpu_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// A bridge that does not know where a container is sends its packets to all. A
// neighbour that gets them, too, and has used up what it may, has only its own
// dropped.
func TestFloodedPacketsAreNotDropped(t *testing.T) {
	t.Run("tc", func(t *testing.T) { floodedPackets(t, newHost(t, sandbox.CPU{})) })
	t.Run("xdp", func(t *testing.T) {
		h := newHost(t, sandbox.CPU{})
		h.byXDP()
		floodedPackets(t, h)
		if h.door().By != netcpu.ByXDP {
			t.Errorf("the uplink drops at %+v", h.door())
		}
	})
}

func floodedPackets(t *testing.T, h *host) {
	victim := create(t, h.sandboxes, sandbox.Spec{Name: "victim"})
	must(t, sandbox.Wire(
		sandbox.End{Box: h.ns, Name: "h1", Bridge: "br0"},
		sandbox.End{Box: victim, Name: "eth0", Addr: netip.MustParsePrefix("10.66.0.3/24")}))
	got := h.start(victim, "udp-recv", "--listen", ":9000")
	h.start(h.box, "udp-recv", "--listen", ":9000")
	must(t, h.box.Limit(sandbox.CPU{Quota: time.Millisecond, Period: 100 * time.Millisecond}))
	h.apply(h.container, policy.NetCPUCharge)
	must(t, h.ns.Sysfs(func(sys string) error { // it forgets at once where everybody is
		return os.WriteFile(filepath.Join(sys, "class/net/br0/bridge/ageing_time"), []byte("0"), 0)
	}))
	sent := h.start(h.wire, "udp-send", "--to", "10.66.0.3:9000", "--rate", "1000")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "30000", "--size", "100")
	dropped := func() float64 { return h.sample(h.container.ID, "netcpu_quota_dropped_packets_total") }
	until(t, "the neighbour's packets are dropped", func() bool { return dropped() > 1000 })
	// Where the receiver, or the softirq before it, has to wait for a CPU, some get
	// lost for lack of room. What is dropped for the neighbour's sake always is.
	for try := 1; ; try++ {
		d, g, s := dropped(), got.Read(), sent.Read()
		gone := func() uint64 { return sent.Read().Since(s).Ops }
		until(t, "enough are dropped, and sent", func() bool { return dropped()-d >= 1000 && gone() >= 500 })
		lost, went, came := dropped()-d, gone(), got.Read().Since(g).Ops
		t.Logf("%d sent, %d received, and %.0f of the neighbour's dropped", went, came, lost)
		if came >= went*9/10 {
			return
		}
		if try == 4 {
			t.Fatalf("in none of %d windows all others come", try)
		}
	}
}
