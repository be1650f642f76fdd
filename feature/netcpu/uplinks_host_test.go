package netcpu_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// Bulk TCP gets its super-packets back, and loses them to a flood.
func TestShapeFollowsTraffic(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	h.apply(h.container, policy.NetCPUIsolate)
	if got := h.state()["h0 tso"]; got != netdev.Off {
		t.Fatalf("tso of h0 is %q, want it off", got)
	}
	h.start(h.box, "tcp-recv", "--listen", ":9001")
	h.start(h.wire, "tcp-send", "--to", "10.66.0.2:9001", "--size", "65536")
	h.until("bulk TCP alone", netdev.TSO.On())
	h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000")
	h.until("a flood beside it", netdev.Off)
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

func (h *host) until(what, tso string) {
	h.t.Helper()
	for end := time.Now().Add(90 * time.Second); h.state()["h0 tso"] != tso; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			h.t.Fatalf("%s: tso of h0 is still %q", what, h.state()["h0 tso"])
		}
	}
}

// A queue that brings others' packets too brings more for a container than its quota pays for, or
// its weight beside others that go short, while all CPUs are busy: most of them are dropped at the
// uplink, which polls by a timer. That ends with the flood.
func TestFloodIsPaced(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Close())
	h.feltFrom = 2000
	h.open()
	h.start(h.box, "udp-recv")
	h.othersPackets("200")
	h.busy()
	deferred := func() bool { return h.hosts(netdev.KindDefer) }
	limits := []sandbox.CPU{{Quota: 10 * time.Millisecond, Period: 100 * time.Millisecond}}
	if _, err := cgroup.Waited(h.container.Cgroup.V2); !errors.Is(err, errors.ErrUnsupported) {
		limits = append(limits, sandbox.CPU{Quota: -1, Shares: 102})
	}
	for _, limit := range limits {
		must(t, h.box.Limit(limit))
		h.apply(h.container, policy.NetCPUIsolate)
		_, sender := h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000")
		until(t, fmt.Sprintf("the flood is paced with %+v", limit), deferred)
		sender.Kill()
		until(t, "polls are prompt again", func() bool { return !deferred() })
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

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
	stop := h.busy()
	threaded := func() bool { return h.hosts(netdev.KindThreaded) }
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
	_, sender = h.Load(h.wire, nil, sends...)
	until(t, "the uplink rests again", func() bool { return !threaded() })
	// The flood ends, too: on two CPUs it leaves none idle, and a rest of a minute ends by itself.
	for _, kill := range append(stop, sender.Kill) {
		kill()
	}
	until(t, "threads poll the uplink again", threaded)
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

// busy has a neighbour on each CPU that computes. It returns what ends that.
func (h *host) busy() (stop []func()) {
	h.t.Helper()
	for cpu := range runtime.NumCPU() {
		neighbour := h.create(sandbox.Spec{Name: fmt.Sprint("burns", cpu), CPU: sandbox.CPU{Set: strconv.Itoa(cpu)}})
		_, burns := h.Load(neighbour, nil, "burn")
		stop = append(stop, burns.Kill)
		h.apply(h.Describe(neighbour), policy.NetCPUObserve)
	}
	return stop
}

// hosts reports whether the journal has a change of this kind that is the host's and no container's.
func (h *host) hosts(kind string) bool {
	return slices.ContainsFunc(h.journal.Entries(), func(e journal.Entry) bool {
		return e.Ref.Kind == kind && e.Owner.Container == 0
	})
}
