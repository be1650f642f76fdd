package netcpu_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A queue that brings others' packets too brings more for a container than its quota pays for, or
// its weight beside others that go short, while all CPUs are busy: most of them are dropped at the
// uplink, which polls by a timer. That ends with the flood.
func TestFloodIsPaced(t *testing.T) {
	for _, c := range []struct {
		name  string
		limit sandbox.CPU
	}{
		{"quota", sandbox.CPU{Quota: 10 * time.Millisecond, Period: 100 * time.Millisecond}},
		{"weight", sandbox.CPU{Shares: 102}},
	} {
		t.Run(c.name, func(t *testing.T) { testFloodIsPaced(t, c.limit) })
	}
}

func testFloodIsPaced(t *testing.T, limit sandbox.CPU) {
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	if _, err := cgroup.Waited(h.container.Cgroup.V2); limit.Quota == 0 && errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, err.Error())
	}
	must(t, h.netcpu.Close())
	h.feltFrom = 2000
	h.open()
	h.start(h.box, "udp-recv")
	must(t, h.box.Limit(limit))
	h.apply(h.container, policy.NetCPUIsolate)
	h.othersPackets("200")
	for cpu := range runtime.NumCPU() {
		neighbour := h.create(sandbox.Spec{Name: fmt.Sprint("burns", cpu), CPU: sandbox.CPU{Set: strconv.Itoa(cpu)}})
		h.start(neighbour, "burn")
		h.apply(h.Describe(neighbour), policy.NetCPUObserve)
	}
	_, sender := h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000")
	deferred := func() bool {
		return slices.ContainsFunc(h.journal.Entries(), func(e journal.Entry) bool { return e.Ref.Kind == netdev.KindDefer })
	}
	until(t, "the flood is paced", deferred)
	sender.Kill()
	until(t, "polls are prompt again", func() bool { return !deferred() })
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}
