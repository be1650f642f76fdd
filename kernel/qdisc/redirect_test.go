package qdisc_test

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// While a device's packets are led to one IFB after the other, each of them passes one. None goes
// round because a filter of somebody else ends the kernel's own mark of what has been redirected.
func TestLeadLeavesNoGap(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours(class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, 1000*mbit))
	at := netlink.QdiscAttrs{LinkIndex: w.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	theirs := netlink.FilterAttrs{LinkIndex: w.index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL}
	must(t, errors.Join(w.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: at}), w.h.FilterAdd(&netlink.U32{FilterAttrs: theirs, ClassId: 1})))
	var ifbs []int
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
	earlier := netlink.FilterAttrs{LinkIndex: w.index, Parent: qdisc.Handle, Priority: 1, Protocol: unix.ETH_P_ALL} // release's
	must(t, w.h.FilterAdd(&netlink.U32{FilterAttrs: earlier, RedirIndex: ifbs[0]}))
	must(t, qdisc.Lead(w.ns, w.index, ifbs[0], true))
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
	switches := 1000
	if testing.Short() { // in a guest each takes up to 80 ms
		switches = 200
	}
	for i := range switches {
		must(t, qdisc.Lead(w.ns, w.index, ifbs[(i+1)%2], true))
	}
	close(done)
	n, passed := <-sent, 0
	for _, index := range ifbs {
		l, err := w.h.LinkByIndex(index)
		must(t, err)
		passed += int(l.Attrs().Statistics.RxPackets)
	}
	if n < switches || passed < n {
		t.Errorf("of %d packets %d passed an IFB", n, passed)
	}
	testkit.Await(t, "packets have come back to their class", func() bool {
		all, err := d.Stats(qdisc.KindHTB)
		return err == nil && all[qdisc.MinorDefault].Packets >= 100
	})
	leads := func(when string, want bool) {
		t.Helper()
		filters, err := w.h.FilterList(w.u0, qdisc.Handle)
		must(t, err)
		if n := len(filters); n > 0 != want || n > 2 { // the preference, and the filter
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

// A program chooses the class of packets whose priority is none that is there. Another program takes
// its place, and stays after its process has closed it. It is asked about what comes back from an IFB.
func TestSort(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours(class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, 1000*mbit), class(5, 1000*mbit), class(6, 1000*mbit))
	chooses := func(minor uint32) {
		t.Helper()
		choice := qdisc.Handle | minor
		p, err := testkit.Verdict(ebpf.SchedCLS, "fl_test", int32(choice))
		must(t, err)
		defer p.Close()
		for range 2 {
			must(t, qdisc.Sort(w.ns, w.index, p))
		}
	}
	gets := func(priority uint32, want uint16) {
		t.Helper()
		before, err := d.Stats(qdisc.KindHTB)
		must(t, err)
		w.send(priority, 20)
		testkit.Await(t, fmt.Sprintf("packets of priority %x in class %x", priority, want), func() bool {
			now, err := d.Stats(qdisc.KindHTB)
			return err == nil && now[want].Packets-before[want].Packets >= 20
		})
	}
	gets(0, qdisc.MinorDefault)
	chooses(5)
	gets(0, 5)
	gets(qdisc.Handle|7, 5)
	gets(qdisc.Handle|6, 6)
	chooses(6)
	gets(0, 6)
	chooses(7)
	gets(0, qdisc.MinorDefault)
	err := w.ns.IFB(w.index, true).Write(netdev.OurIFB)
	if errors.Is(err, unix.EOPNOTSUPP) {
		testkit.Skip(t, "kernel has no ifb")
	}
	must(t, err)
	ifb, err := w.ns.Index(netdev.IFBName(w.index, true))
	must(t, err)
	chooses(5)
	must(t, qdisc.Lead(w.ns, w.index, ifb, true))
	gets(0, 5)
	if l, err := w.h.LinkByIndex(ifb); err != nil || l.Attrs().Statistics.RxPackets < 20 {
		t.Errorf("they have not passed the IFB: %v", err)
	}
	must(t, qdisc.Lead(w.ns, w.index, ifb, false))
	gets(0, 5)
}
