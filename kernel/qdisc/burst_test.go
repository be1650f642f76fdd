package qdisc_test

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// listener receives changes of the classes in the near namespace.
type listener struct{ s *nl.NetlinkSocket }

func (w *wire) listen() listener {
	w.t.Helper()
	var l listener
	must(w.t, w.near.Do(func() (err error) {
		l.s, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_TC)
		return err
	}))
	w.t.Cleanup(func() { l.s.Close() })
	// The kernel sends the notification of a change before the acknowledgement, so all is there.
	must(w.t, l.s.SetReceiveTimeout(&unix.Timeval{Usec: 10_000}))
	return l
}

// heard returns what some classes became since its last call, in order.
func (l listener) heard(t *testing.T, minors ...uint16) (out []qdisc.Ceiling) {
	t.Helper()
	for {
		list, _, err := l.s.Receive()
		if errors.Is(err, unix.EAGAIN) {
			return out
		}
		must(t, err)
		for _, m := range list {
			if m.Header.Type != unix.RTM_NEWTCLASS {
				continue
			}
			c, err := qdisc.ParseCeiling(m.Data)
			must(t, err)
			if slices.Contains(minors, c.Minor) {
				out = append(out, c)
			}
		}
	}
}

// became waits until classes became something n times, as far as they have these ceils, and returns
// what: the news of a change before can come late. It does not wait if a class had sent all before.
func (l listener) became(t *testing.T, n int, ceils map[uint16]uint64) (out []qdisc.Ceiling) {
	t.Helper()
	minors := slices.Collect(maps.Keys(ceils))
	other := func(c qdisc.Ceiling) bool { return c.Ceil != ceils[c.Minor] }
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		out = append(out, slices.DeleteFunc(l.heard(t, minors...), other)...)
		if len(out) >= n || len(out) > 0 && out[0].Packets >= 1000 {
			break
		}
	}
	return append(out, slices.DeleteFunc(l.heard(t, minors...), other)...)
}

// crowd returns classes with a last one, of the given minor, that has 1000 packets of 542 bytes to
// send, which the top passes at a rate, and has saved up 400 ms of its ceil.
func (w *wire) crowd(d *qdisc.Device, minor uint16, rate uint64) []qdisc.Class {
	w.t.Helper()
	classes := []qdisc.Class{class(qdisc.MinorTop, rate), class(qdisc.MinorDefault, mbit), class(minor, mbit)}
	top, last := &classes[0].HTB, &classes[2].HTB
	top.Ceil, top.Burst, top.CBurst = rate, 2000, 2000
	last.Burst, last.CBurst = 2000, 50_000_000
	_, err := d.Bring(qdisc.KindHTB, classes)
	must(w.t, err)
	for range 10 {
		w.sendSized(qdisc.Handle|uint32(minor), 100, 500) // what one socket has room for
	}
	return classes
}

// slow is a rate of the top at which a crowd's packets wait for a minute and more.
const slow = 50_000

// TestLowerCeilSpendsNoSavings lowers the ceil of a class that has saved up 400 ms of it, with a
// burst that would let it keep them.
func TestLowerCeilSpendsNoSavings(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours()
	l := w.listen()
	for minor, end := uint16(1), time.Now().Add(time.Minute); time.Now().Before(end); minor++ {
		classes := w.crowd(d, minor, 4*mbit) // a packet in 1.1 ms
		l.heard(t, minor)
		classes[2].HTB.Ceil, classes[2].HTB.CBurst = 2*mbit, 100_000
		start := time.Now()
		bring(t, d, 1, classes...)
		if took := time.Since(start); took < 3*time.Millisecond {
			t.Fatalf("done in %v, too soon for a packet to leave", took)
		}
		got := l.became(t, 2, map[uint16]uint64{minor: 2 * mbit})
		if len(got) == 1 && got[0].Packets >= 1000 {
			t.Log("all packets have left before the change: the machine has stood still for a second")
			continue
		}
		if len(got) != 2 || got[0].Burst > 13*time.Millisecond || got[1].Burst != 400*time.Millisecond {
			t.Fatalf("%+v; want the ceil with a burst of 12 ms, and then with one of 400 ms", got)
		}
		if got[0].Saved < 300*time.Millisecond {
			t.Logf("%v are left, as the packets that have left spent the rest: the machine has stood still", got[0].Saved)
			continue
		}
		if got[1].Packets == got[0].Packets {
			t.Logf("no packet has left in time: %+v", got)
			continue
		}
		if got[1].Saved > got[0].Burst {
			t.Errorf("%v are still saved up", got[1].Saved)
		}
		bring(t, d, 0, classes...)
		return
	}
	t.Error("no packet has ever left in time, with the savings there")
}

// A class gets its burst in the end, whatever becomes of the others; and if an agent has left it
// with a tight one, the next agent sets it.
func TestTightBurstDoesNotStay(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours()
	l := w.listen()
	classes := w.crowd(d, 5, slow)
	l.heard(t, 5)
	last := &classes[2].HTB
	last.Ceil, last.CBurst = 3*mbit, 150_000
	if n, err := d.Bring(qdisc.KindHTB, append(classes, qdisc.Class{Minor: 6})); err == nil { // a rate of 0
		t.Fatalf("a class without a rate: %d changes, no error", n)
	}
	if got := l.became(t, 2, map[uint16]uint64{5: 3 * mbit}); len(got) != 2 || got[1].Burst != 400*time.Millisecond {
		t.Errorf("beside an error: %+v; want a tight burst and then one of 400 ms", got)
	}
	// What the first of the two writes leaves.
	last.CBurst = 3028
	_, err := d.Bring(qdisc.KindHTB, classes)
	must(t, err)
	last.CBurst = 150_000
	again := w.device()
	bring(t, again, 1, classes...)
	if got := l.became(t, 2, map[uint16]uint64{5: 3 * mbit}); len(got) != 2 || got[1].Burst != 400*time.Millisecond {
		t.Errorf("left tight: %+v; want a tight burst and then one of 400 ms", got)
	}
}

// Only a lowered ceil takes the time: no raised one, and none of an empty class.
func TestBurstIsSetAtOnce(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	d := w.ours()
	l := w.listen()
	classes := append(w.crowd(d, 5, slow), class(6, mbit))
	_, err := d.Bring(qdisc.KindHTB, classes)
	must(t, err)
	l.heard(t, 5, 6)
	classes[2].HTB.Ceil *= 2   // raised
	classes[3].HTB.Ceil = mbit // lowered, and empty
	bring(t, d, 2, classes...)
	if got := l.became(t, 2, map[uint16]uint64{5: classes[2].HTB.Ceil, 6: mbit}); len(got) != 2 || got[0].Minor != 5 || got[1].Minor != 6 {
		t.Errorf("%+v; want each class set once", got)
	}
}
