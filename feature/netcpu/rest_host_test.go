package netcpu_test

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// No thread polls a queue that containers share while all CPUs compute and no flood comes in.
// Threads do so again when CPUs are idle, and when the agent ends.
func TestUplinksRest(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Close())
	h.feltFrom = 1 << 40 // whatever comes in is no flood
	h.open()
	h.start(h.box, "udp-recv")
	h.apply(h.container, policy.NetCPUIsolate)
	h.othersPackets("200")
	var stop []func()
	for cpu := range runtime.NumCPU() {
		neighbour := h.create(sandbox.Spec{Name: fmt.Sprint("computes", cpu), CPU: sandbox.CPU{Set: strconv.Itoa(cpu)}})
		_, burns := h.Load(neighbour, nil, "burn")
		stop = append(stop, burns.Kill)
	}
	threaded := func() bool {
		return slices.ContainsFunc(h.journal.Entries(), func(e journal.Entry) bool {
			return e.Ref.Kind == netdev.KindThreaded && e.Owner.Container == 0
		})
	}
	if !threaded() {
		t.Fatal("no thread polls the uplink at first")
	}
	sends := []string{"udp-send", "--to", "10.66.0.2:9000"}
	_, sender := h.Load(h.wire, nil, sends...)
	until(t, "the uplink rests", func() bool { return !threaded() })
	sender.Kill() // a new thread would have to wait beside softirqs that all of it keeps busy
	must(t, h.netcpu.Close())
	if !threaded() {
		t.Error("no thread polls the uplink without the agent")
	}
	h.open()
	h.apply(h.container, policy.NetCPUIsolate)
	h.start(h.wire, sends...)
	until(t, "the uplink rests again", func() bool { return !threaded() })
	for _, kill := range stop {
		kill()
	}
	until(t, "threads poll the uplink again", threaded)
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}
