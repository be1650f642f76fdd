package traffic_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// shaper is the kind of qdisc that keeps a latency on this kernel.
func shaper() qdisc.Kind {
	if qdisc.Supported(qdisc.KindHFSC) == nil {
		return qdisc.KindHFSC
	}
	return qdisc.KindHTB
}

// sentBy returns the counters of a container's class at nic0, after checking the kind of the root.
func (h *host) sentBy(kind qdisc.Kind, c container.Container) qdisc.Stats {
	h.t.Helper()
	d, err := qdisc.Open(h.Open(h.ns), h.nic0)
	must(h.t, err)
	defer d.Close()
	all, err := d.Stats(kind)
	must(h.t, err)
	st, there := all[uint16(h.slots.Lookup(c.TenantKey()))]
	if !there {
		h.t.Errorf("no class for %s: %v", c.Name, all)
	}
	return st
}

// HFSC, if the kernel has it, keeps a latency, unless a container has a priority; otherwise HTB
// does. What cannot be kept is refused.
func TestLatencyPolicy(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	before := h.state()
	packets := func(kind qdisc.Kind) {
		t.Helper()
		was := h.sentBy(kind, c).Packets
		sent := h.send(box, "10.66.0.1:9000")
		if n := counted(func() uint64 { return h.sentBy(kind, c).Packets }, was, sent); n < sent {
			t.Errorf("%s: %d packets were sent, %d are in the class", kind, sent, n)
		}
	}
	urgent := policy.Net{Rate: mbit, Latency: 2 * time.Millisecond}
	must(t, h.apply(two, policy.Net{Weight: 3}))
	must(t, h.apply(c, urgent))
	packets(shaper())
	again := len(h.journal.Entries())
	low := 7
	must(t, h.apply(two, policy.Net{Weight: 3, Priority: &low})) // HFSC knows no priorities
	packets(qdisc.KindHTB)
	must(t, h.apply(two, policy.Net{Weight: 3}))
	packets(shaper())
	if n := len(h.journal.Entries()); n != again {
		t.Errorf("%d entries, had %d: %+v", n, again, h.journal.Entries())
	}

	// Shorter than a packet of another takes: nothing changes.
	during := h.state()
	err := h.apply(c, policy.Net{Rate: mbit, Latency: 500 * time.Microsecond})
	if !errors.Is(err, model.ErrInfeasible) || !strings.Contains(err.Error(), "uplink nic0: latency refused: a packet of any other container") {
		t.Errorf("500 us: %v", err)
	}
	testkit.Same(t, "refused, and changed", during, h.state())
	packets(shaper())

	// The last latency goes, and with it the need for HFSC.
	must(t, h.apply(c, policy.Net{Rate: mbit}))
	packets(qdisc.KindHTB)

	must(t, h.traffic.Remove(t.Context(), c.ID))
	h.removes(before, two.ID)
}
