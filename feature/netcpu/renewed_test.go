package netcpu_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A container that gets a quota while it has a queue loses the queue if the quota does not stop its
// thread, and gets one again without the quota. If it ends after the uplink has recreated its
// queues, its changes are still undone.
func TestQueueOfAnEndedThread(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	throttled, err := probe.KthreadsThrottled(kernel.Default())
	must(t, err)
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	h.start(h.box, "udp-recv")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", worth())
	h.untilThreads("one container's packets alone", payer(h.container), h.uplinkGroup())
	if !throttled {
		must(t, h.box.Limit(sandbox.CPU{Quota: 80 * time.Millisecond, Period: 100 * time.Millisecond}))
		h.untilThreads("with a quota over two CPUs", h.uplinkGroup(), h.uplinkGroup())
		must(t, h.box.Limit(sandbox.CPU{Quota: -1}))
		h.untilThreads("without a quota again", payer(h.container), h.uplinkGroup())
	}
	was := h.polling("nic0")
	h.Change(h.ns, "nic0", (*netlink.Handle).LinkSetDown)
	until(t, "the threads of nic0 end", func() bool {
		return !slices.ContainsFunc(was, func(th sched.Thread) bool { now, err := sched.Find("/proc", th.TID); return err == nil && now == th })
	})
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
	h.Change(h.ns, "nic0", (*netlink.Handle).LinkSetUp)

	// The namespace is another container's now, which is isolated like the first one.
	next := h.create(sandbox.Spec{Name: "next", Network: h.box})
	c := h.describe(next)
	h.apply(c, policy.NetCPUIsolate)
	if got := h.threads()["eth0"]; len(got) != 1 || got[0] != payer(c) {
		t.Errorf("threads of eth0 are in %q, want %q", got, payer(c))
	}
	must(t, h.netcpu.Remove(t.Context(), c.ID))
}

// restart sets a device down and up.
func restart(b *sandbox.Box, dev string) error {
	return errors.Join(b.Change(dev, (*netlink.Handle).LinkSetDown), b.Change(dev, (*netlink.Handle).LinkSetUp))
}

// Recreated NAPIs of a device have new threads, in the root group: these are placed again, at the
// container and at the uplink.
func TestThreadsMadeAnew(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	before := h.state()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	inside := h.Open(h.box)
	gro := inside.Offload(h.Index(h.box, "eth0"), netdev.GRO)
	for _, made := range []struct {
		what, device string
		anew         func() error
	}{
		{"link down and up in the container", "eth0", func() error {
			return restart(h.box, "eth0")
		}},
		{"GRO off and on in the container", "eth0", func() error {
			return errors.Join(gro.Write(netdev.Off), gro.Write(netdev.GRO.On()))
		}},
		{"GRO off in the container", "eth0", func() error { return gro.Write(netdev.Off) }},
		{"link down and up at the uplink", "nic0", func() error {
			return restart(h.ns, "nic0")
		}},
	} {
		was := h.polling(made.device)
		must(t, made.anew())
		want := map[string][]string{"eth0": {payer(h.container)}, "nic0": {h.uplinkGroup(), h.uplinkGroup()}}[made.device]
		until(t, made.what, func() bool {
			ended := !slices.ContainsFunc(h.polling(made.device), func(th sched.Thread) bool { return slices.Contains(was, th) })
			// They reach their groups before they get their slice, which threads checks.
			return ended && h.hastened(made.device, len(want)) && slices.Equal(h.threads()[made.device], want)
		})
	}

	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal after Remove: %+v", left)
	}
	same(t, "after Remove", h.state(), before)
}

// hastened reports whether this many threads of a device have their slice, which is set last, if
// the kernel has slices.
func (h *host) hastened(device string, want int) bool {
	n := 0
	for _, th := range h.polling(device) {
		slice, err := sched.Slice("/proc", th).Read()
		if err == nil && (slice == sched.NoSlice || slice == sched.FormatSlice(100*time.Microsecond)) {
			n++
		}
	}
	return n >= want // an older kernel may have kept a thread
}
