package qdisc_test

import (
	"errors"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// newLed makes a wire whose packets are led to the first of two IFBs.
func newLed(t *testing.T) (w *wire, ifbs []int) {
	t.Helper()
	w = newWire(t)
	must(t, qdisc.Root(w.ns, w.index).Write(qdisc.Ours(qdisc.KindHTB)))
	_, err := w.device().Bring(qdisc.KindHTB, []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, 1000*mbit)})
	must(t, err)
	for i := range 2 {
		err := w.ns.IFB(w.index+i, true).Write(netdev.OurIFB)
		if errors.Is(err, unix.EOPNOTSUPP) {
			testkit.Skip(t, "kernel has no ifb")
		}
		must(t, err)
		index, err := w.ns.Index(netdev.IFBName(w.index+i, true))
		must(t, err)
		ifbs = append(ifbs, index)
	}
	must(t, qdisc.Lead(w.ns, w.index, ifbs[0], true))
	return w, ifbs
}

// No packet goes round between a device and its IFB because a filter of somebody else at the device
// ends the kernel's own mark of what has been redirected.
func TestLeadBesideFilter(t *testing.T) {
	testkit.OnKernels(t)
	w, _ := newLed(t)
	d := w.device()
	at := netlink.FilterAttrs{LinkIndex: w.index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL}
	must(t, w.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}))
	must(t, w.h.FilterAdd(&netlink.U32{FilterAttrs: at, ClassId: 1}))
	w.send(0, 20)
	testkit.Await(t, "the packets have come back to their class", func() bool {
		all, err := d.Stats(qdisc.KindHTB)
		must(t, err)
		return all[qdisc.MinorDefault].Packets >= 20
	})
}

// While a device's packets are led to one IFB after the other, each of them passes one.
func TestLeadLeavesNoGap(t *testing.T) {
	testkit.OnKernels(t)
	w, ifbs := newLed(t)
	done, sent := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { sent <- n }()
		w.dial(func(c *net.UDPConn) error {
			for ; ; n++ {
				select {
				case <-done:
					return nil
				default:
				}
				if err := testkit.SendDatagrams(c, 1, 100); err != nil {
					return err
				}
			}
		})
	}()
	for i := range 1000 {
		must(t, qdisc.Lead(w.ns, w.index, ifbs[(i+1)%2], true))
	}
	close(done)
	n, passed := <-sent, 0
	for _, index := range ifbs {
		l, err := w.h.LinkByIndex(index)
		must(t, err)
		passed += int(l.Attrs().Statistics.RxPackets)
	}
	if n < 1000 || passed < n {
		t.Errorf("of %d packets %d passed an IFB", n, passed)
	}
	leads := func(when string, want bool) {
		t.Helper()
		filters, err := w.h.FilterList(w.u0, qdisc.Handle)
		must(t, err)
		if n := len(filters); n > 0 != want || n > 2 { // netlink's package counts the preference, too
			t.Errorf("%s: %d filters: %+v", when, n, filters)
		}
	}
	leads("in the end", true)
	must(t, qdisc.Lead(w.ns, w.index, ifbs[1], false))
	leads("no longer to the other", true)
	must(t, qdisc.Lead(w.ns, w.index, ifbs[0], false))
	leads("no longer", false)
	must(t, qdisc.Lead(w.ns, w.index, ifbs[0], true))
	must(t, w.ns.IFB(w.index, true).Write(netdev.NoDevice))
	must(t, qdisc.Lead(w.ns, w.index, ifbs[1], false))
	leads("to an IFB that has gone", false)
}
