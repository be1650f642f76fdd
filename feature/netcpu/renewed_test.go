package netcpu_test

import (
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// A container that was given a queue ends after the uplink has made its queues
// anew: what it had is undone none the less.
func TestQueueOfAnEndedThread(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	h.start(h.box, "udp-recv")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "3000")
	h.untilThreads("one container's packets alone", payer(h.container), h.uplinkGroup())
	must(t, setUp(h.ns, "nic0", false))
	until(t, "the threads of nic0 end", func() bool { return len(h.threads()["nic0"]) == 0 })
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
	must(t, setUp(h.ns, "nic0", true))

	// The namespace is another container's now, which is isolated as the first was.
	next, err := h.sandboxes.Create(sandbox.Spec{Name: "next", Network: h.box})
	must(t, err)
	c := h.describe(next)
	h.apply(c, policy.NetCPUIsolate)
	if got := h.threads()["eth0"]; len(got) != 1 || got[0] != payer(c) {
		t.Errorf("threads of eth0 are in %q, want %q", got, payer(c))
	}
	must(t, h.netcpu.Remove(t.Context(), c.ID))
}

// setUp brings a device of a sandbox up or down.
func setUp(b *sandbox.Box, device string, up bool) error {
	return b.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if up {
			return netlink.LinkSetUp(l)
		}
		return netlink.LinkSetDown(l)
	})
}
