package netcpu_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A bridge that does not know a container's port floods its packets. A neighbour that gets them
// too, and has used up its budget, loses only its own packets.
func TestFloodedPacketsAreNotDropped(t *testing.T) {
	testkit.InFull(t)
	for _, by := range testkit.Cases(t, 1, drop.ByXDP, drop.ByTC) {
		t.Run(string(by), func(t *testing.T) {
			h := newHost(t, sandbox.CPU{})
			if by == drop.ByXDP {
				h.byXDP()
			}
			floodedPackets(t, h)
			if h.dropPoint().By != by {
				t.Errorf("the uplink drops at %+v", h.dropPoint())
			}
		})
	}
}

func floodedPackets(t *testing.T, h *host) {
	victim := h.create(sandbox.Spec{Name: "victim"})
	h.Join(victim, "10.66.0.3/24", h.ns, "h1")
	// With XDP at a veth, 6.1 uses a page for each packet. The usual buffer has room for 49 of
	// them: too few while the receiver waits for a CPU.
	got := h.start(victim, "udp-recv", "--listen", ":9000", "--buffer", "4000000")
	h.start(h.box, "udp-recv", "--listen", ":9000")
	must(t, h.box.Limit(sandbox.CPU{Quota: time.Millisecond, Period: 100 * time.Millisecond}))
	h.apply(h.container, policy.NetCPUCharge)
	must(t, h.ns.Sysfs(func(sys string) error { // the bridge forgets its addresses at once
		return os.WriteFile(filepath.Join(sys, "class/net/br0/bridge/ageing_time"), []byte("0"), 0)
	}))
	// The rate is above the neighbour's limit, and low enough that no queue on the way overflows
	// while a task waits for a CPU: any loss is a drop.
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "5000", "--size", "100")
	dropped := func() uint64 { return h.netcpu.Drops()[h.container.ID].Beyond }
	until(t, "the neighbour's packets are dropped", func() bool { return dropped() > 100 })
	sent := h.start(h.wire, "udp-send", "--to", "10.66.0.3:9000", "--rate", "200", "--size", "100")
	from := dropped()
	ops := func(b *load.Board) uint64 { return b.Read().Since(load.Reading{}).Ops }
	until(t, "more are dropped, and others sent", func() bool { return dropped() > from+enough(1000) && ops(sent) >= 200 })
	sent.SetRate(0)
	until(t, "the others' sender rests", func() bool {
		was := ops(sent)
		time.Sleep(50 * time.Millisecond)
		return ops(sent) == was
	})
	until(t, fmt.Sprintf("all of the %d packets of others come", ops(sent)), func() bool { return ops(got) == ops(sent) })
}
