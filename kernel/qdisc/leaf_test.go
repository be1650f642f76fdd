package qdisc_test

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// lengths receives the lengths of the packets that leave the near device.
func (w *wire) lengths() (next func() []int) {
	w.t.Helper()
	fd := -1
	must(w.t, w.near.Do(func() (err error) {
		const all = 0x0300 // ETH_P_ALL in network order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, all); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: w.index}),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20))
	}))
	w.t.Cleanup(func() { unix.Close(fd) })
	return func() (out []int) {
		for buf := make([]byte, 1); ; {
			n, from, err := unix.Recvfrom(fd, buf, unix.MSG_TRUNC)
			if err != nil {
				return out
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING && n > 500 {
				out = append(out, n)
			}
		}
	}
}

// segments sends one super-packet of n datagrams of 1000 bytes by a class.
func (w *wire) segments(minor uint16, n int) {
	w.t.Helper()
	w.dial(func(c *net.UDPConn) error {
		_, err := c.Write(make([]byte, 1000*n))
		return err
	}, unix.SOL_SOCKET, unix.SO_PRIORITY, int(qdisc.Handle|uint32(minor)), unix.SOL_UDP, unix.UDP_SEGMENT, 1000)
}

// Exactly the packets of classes with Split are cut, with HTB and HFSC.
func TestSplit(t *testing.T) {
	testkit.OnKernels(t)
	for _, kind := range []qdisc.Kind{qdisc.KindHTB, qdisc.KindHFSC} {
		t.Run(string(kind), func(t *testing.T) {
			testkit.NeedRoot(t)
			if errors.Is(qdisc.Supported(kind), unix.ENOENT) {
				testkit.Skip(t, "kernel has no hfsc")
			}
			testSplit(t, kind)
		})
	}
}

func testSplit(t *testing.T, kind qdisc.Kind) {
	w := newWire(t)
	w.answered()
	d := w.device()
	must(t, qdisc.Root(w.ns, w.index).Write(qdisc.Ours(kind)))
	curve := qdisc.Curve{M1: 1000 * mbit, M2: 1000 * mbit}
	classes := []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, 100*mbit), class(1, 100*mbit), class(2, 100*mbit)}
	for i := range classes {
		classes[i].HFSC = qdisc.HFSC{LinkShare: curve, RealTime: curve}
	}
	classes[0].HFSC.RealTime = qdisc.Curve{}
	bring := func(want int) {
		t.Helper()
		for _, want := range []int{want, 0} { // twice: it reads first
			if n, err := d.Bring(kind, classes); err != nil || n != want {
				t.Fatalf("%d changes, %v; want %d", n, err, want)
			}
		}
	}
	next := w.lengths()
	// sends checks the packet lengths that one super-packet of a class leaves as.
	sends := func(minor uint16, want int) {
		t.Helper()
		next()
		was, err := d.Stats(kind)
		must(t, err)
		w.segments(minor, 20)
		var got []int
		for end := time.Now().Add(10 * time.Second); len(got) < want && time.Now().Before(end); time.Sleep(time.Millisecond) {
			got = append(got, next()...)
		}
		size := map[bool]int{true: 1042, false: 20042}[want == 20]
		if len(got) != want || got[0] != size || got[want-1] != size {
			t.Fatalf("class %d: packets of %v bytes, want %d of %d", minor, got, want, size)
		}
		is, err := d.Stats(kind)
		must(t, err)
		n, b := is[minor].Packets-was[minor].Packets, is[minor].Bytes-was[minor].Bytes
		if n != 20 || b != 20*1042 || is[minor].Drops != 0 || is[minor].Queued != 0 || is[minor].Backlog != 0 {
			t.Errorf("class %d: %d packets, %d bytes, %+v", minor, n, b, is[minor])
		}
	}
	bring(4)
	sends(1, 1)
	classes[2].Split = 1522
	bring(1)
	sends(1, 20)
	sends(2, 1)
	classes[2].Split = 1530 // in place
	bring(1)
	sends(1, 20)
	classes[2].Split = 1600
	must(t, errors.Join(d.Widen(kind, 1600), d.Widen(kind, 1522)))
	bring(0)
	sends(1, 20)
	sends(2, 1)
	classes[1].Split = 1530
	bring(1)
	sends(qdisc.MinorDefault, 20)
	classes[1].Split, classes[2].Split = 0, 0
	bring(2)
	sends(1, 1)
	if kinds := w.kinds(); len(kinds) != 1 {
		t.Errorf("qdiscs in the end: %v", kinds)
	}
}

// answered makes the far end listen, which then sends no errors.
func (w *wire) answered() {
	w.t.Helper()
	must(w.t, w.far.Do(func() error {
		c, err := net.ListenUDP("udp", w.address)
		if err == nil {
			w.t.Cleanup(func() { c.Close() })
		}
		return err
	}))
}

// kinds lists the qdiscs of the device, without the kernel's own.
func (w *wire) kinds() (out []string) {
	w.t.Helper()
	list, err := w.h.QdiscList(w.u0)
	must(w.t, err)
	for _, q := range list {
		if q.Attrs().Handle != 0 {
			out = append(out, q.Type())
		}
	}
	return out
}

// Packets in a class are not lost when it stops cutting: the filter stays until the class is empty.
// Frames without room are counted.
func TestSplitEnds(t *testing.T) {
	testkit.InFull(t)
	w := newWire(t)
	w.answered()
	d := w.ours()
	slow := class(1, 1000)
	slow.HTB.Ceil, slow.HTB.Burst, slow.HTB.CBurst = 1000, 2000, 2000
	slow.Split = 1522
	classes := []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, mbit), slow}
	bring(t, d, 4, classes...)
	stats := func() qdisc.Stats {
		t.Helper()
		all, err := d.Stats(qdisc.KindHTB)
		must(t, err)
		return all[1]
	}
	for range 80 { // 1600 kB, where 1522 kB have room
		w.segments(1, 20)
	}
	st := stats()
	if st.Drops == 0 || st.Backlog < 1000_000 || st.Queued+st.Drops+st.Packets != 1600 {
		t.Errorf("full: %+v", st)
	}
	classes[2].Split = 0
	bring(t, d, 1, classes...)
	bring(t, d, 0, classes...)
	if after := stats(); after.Queued+after.Packets != st.Queued+st.Packets || after.Queued == 0 || len(w.kinds()) != 2 {
		t.Errorf("%+v, %v; was %+v", after, w.kinds(), st)
	}
	classes[2].HTB.Rate, classes[2].HTB.Ceil = 1000*mbit, 1000*mbit
	bring(t, d, 1, classes...)
	testkit.Await(t, "no packet waits", func() bool { return stats().Queued == 0 })
	testkit.Same(t, "packets were sent", st.Queued+st.Packets, stats().Packets)
	bring(t, d, 1, classes...)
	if kinds := w.kinds(); len(kinds) != 1 {
		t.Errorf("qdiscs in the end: %v", kinds)
	}
}

// TBF's own backlog may have wrapped around.
func TestSplitCount(t *testing.T) {
	const wrapped = 1<<32 - 60_000
	for _, c := range []struct {
		class         qdisc.Stats
		split         int
		drops         uint64
		backlog, lost uint64
	}{
		{qdisc.Stats{Queued: 3, Backlog: 190_000, Drops: 2}, 0, 0, 190_000, 2}, // super-packets
		{qdisc.Stats{Queued: 3, Backlog: 3126, Drops: 2}, 1522, 5, 3126, 5},
		{qdisc.Stats{Queued: 3, Backlog: wrapped}, 1522, 0, 3 * 1522, 0},
		{qdisc.Stats{Backlog: wrapped}, 1522, 0, 0, 0},
		{qdisc.Stats{Backlog: wrapped}, 65536, 0, 0, 0},
	} {
		got := qdisc.Count(c.class, c.split, c.drops)
		if want := (qdisc.Stats{Queued: c.class.Queued, Backlog: c.backlog, Drops: c.lost}); got != want {
			t.Errorf("%+v cut to %d, %d dropped: %+v, want %+v", c.class, c.split, c.drops, got, want)
		}
	}
}

// A foreign qdisc below a class of ours is not replaced.
func TestSplitLeaf(t *testing.T) {
	testkit.OnKernels(t)
	w := newWire(t)
	classes := []qdisc.Class{class(qdisc.MinorTop, 1000*mbit), class(qdisc.MinorDefault, mbit), class(1, mbit)}
	d := w.ours(classes...)
	must(t, w.h.QdiscAdd(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.index, Handle: 0x70000, Parent: qdisc.Handle | 1}, Rate: mbit, Limit: 50000, Buffer: 20000}))
	bring(t, d, 0, classes...)
	classes[2].Split = 1522
	_, err := d.Bring(qdisc.KindHTB, classes)
	if want := fmt.Sprintf("set how packets of class 1 are cut of device %d in netns %d: somebody's qdisc is below the class", w.index, w.ns.Inode()); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}
