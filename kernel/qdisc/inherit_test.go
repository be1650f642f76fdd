package qdisc_test

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// TestInherit has one process follow another. What the first has attached works on without a gap,
// until the second attaches its own in its place, in the same order.
func TestInherit(t *testing.T) {
	testkit.OnKernels(t)
	h := newHooked(t, false)
	if h.hooks.Filters() {
		testkit.Skip(t, "kernel has no tcx")
	}
	programs := func() int {
		t.Helper()
		var n int
		must(t, h.ns.Do(func() error {
			there, err := link.QueryPrograms(link.QueryOptions{Target: h.index, Attach: ebpf.AttachTCXEgress})
			if err == nil {
				n = len(there.Programs)
			}
			return err
		}))
		return n
	}
	first := []*qdisc.Attachment{h.attach("a", next, true, 1), h.attach("b", drop, true, 2), h.attach("c", next, true, 3)}
	left := h.hooks.Left()
	if len(left) != len(first) {
		t.Fatalf("%d programs are left: %+v", len(left), left)
	}
	i, err := qdisc.Inherit(append(left, qdisc.Left{Link: 1 << 30, Name: "gone"}))
	must(t, err)
	for _, a := range first {
		must(t, a.Die())
	}
	h.want("while nobody works", false)

	h.hooks, err = qdisc.OpenHooks(netdev.NewFinder("/proc", time.Now), h.journal)
	must(t, err)
	h.hooks.Inherit(i)
	a := h.attach("d", pass, true, 1)
	h.want("with one in front of what is inherited", true)
	must(t, a.Close())
	behind := h.attach("e", pass, true, 3)
	h.want("with one behind it", false)
	b := h.attach("b", next, true, 2)
	h.want("with one in its place", true)
	testkit.Same(t, "programs", 4, programs())
	must(t, h.hooks.Disinherit())
	must(t, h.hooks.Disinherit())
	testkit.Same(t, "programs", 2, programs())
	must(t, b.Hold())
	for _, a := range []*qdisc.Attachment{b, behind} {
		must(t, a.Close())
	}
	testkit.Same(t, "programs remain", 0, programs())
}
