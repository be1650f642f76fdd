package traffic_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// longest returns a function that returns the length of the longest packet that a device has sent
// since its last call, and how many it sent.
func (h *host) longest(at *sandbox.Box, index int) func() (length, n int) {
	h.t.Helper()
	fd := -1
	must(h.t, at.Do(func() (err error) {
		const all = 0x0300 // ETH_P_ALL in network order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20))
	}))
	h.t.Cleanup(func() { unix.Close(fd) })
	return func() (length, n int) {
		// As many as fit, however fast further packets arrive.
		for buf := make([]byte, 1); n < 20_000; {
			got, from, err := unix.Recvfrom(fd, buf, unix.MSG_TRUNC)
			if err != nil {
				break
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
				length, n = max(length, got), n+1
			}
		}
		return length, n
	}
}

// super waits until packets longer than frames leave, or only frames in two consecutive looks. On
// failure it reports its last look.
func super(t *testing.T, longest func() (length, n int), want bool, when string) {
	t.Helper()
	longest()
	var length, n int
	for end, good := time.Now().Add(30*time.Second), 0; time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
		if length, n = longest(); n < 20 {
			continue
		}
		if length > 1522 != want {
			good = 0
			continue
		}
		if good++; want || good == 2 {
			return
		}
	}
	t.Errorf("%s: the longest of %d packets has %d bytes, want more than 1522: %v", when, n, length, want)
}

// cuts returns the number of qdiscs that cut packets at a device.
func (h *host) cuts(at *sandbox.Box, dev string) (n int) {
	h.t.Helper()
	h.Change(at, dev, func(hd *netlink.Handle, l netlink.Link) error {
		list, err := hd.QdiscList(l)
		for _, q := range list {
			if q.Type() == "tbf" {
				n++
			}
		}
		return err
	})
	return n
}

const hasty = 200 * time.Microsecond // less than a super-packet takes at 1 Gbit/s

// A latency that other containers' super-packets break is refused, or they are split, as policy says.
// That includes existing connections, holds in every mode, and lasts as long as the latency. Its own
// packets are not split.
func TestLatencySplit(t *testing.T) {
	testkit.InFull(t)
	for _, mode := range testkit.Cases(t, 1, "bridge", "overlay") {
		t.Run(mode, func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			x, y, to := h.two(mode)
			before := h.state()
			must(t, h.apply(x.c, policy.Net{Weight: 1}))
			must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: 2 * time.Millisecond, Split: true})) // needs no splitting
			got := h.run(h.wire, "tcp-recv", "--listen", ":9001")
			bulk := h.run(x.box, "tcp-send", "--to", to+":9001")
			longest := h.longest(h.ns, h.nic0)
			super(t, longest, true, "not needed")

			err := h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty})
			if !errors.Is(err, model.ErrInfeasible) || !strings.Contains(err.Error(), "or latency.split on, as packets of the others are split to at most 1522 bytes") {
				t.Fatalf("not allowed: %v", err)
			}
			super(t, longest, true, "not allowed")
			must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
			super(t, longest, false, "allowed")
			was := got.Read()
			if n := counted(func() uint64 { return got.Read().Since(was).Bytes }, 0, 1<<20); n < 1<<20 {
				t.Errorf("%d bytes come through", n)
			}
			rows := h.traffic.Read().Rows
			for _, row := range rows {
				if want := map[bool]int{true: 1522}[row.Container != api.ID(y.c.ID)]; row.Split != want {
					t.Errorf("%d: split to %d, want %d", row.Container, row.Split, want)
				}
			}
			if n := h.cuts(h.ns, "nic0"); n != 2 || len(rows) != 3 {
				t.Errorf("%d of %d classes are cut, want 2 of 3", n, len(rows))
			}
			must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: 2 * time.Millisecond, Split: true}))
			super(t, longest, true, "not needed any more")

			// Its own: no other latency has to wait for them.
			must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
			super(t, longest, false, "needed again")
			bulk.SetRate(0)
			h.run(y.box, "tcp-send", "--to", to+":9001")
			super(t, longest, true, "its own")

			must(t, h.traffic.Remove(t.Context(), y.c.ID))
			must(t, h.traffic.Remove(t.Context(), x.c.ID))
			if h.state() != before || len(h.journal.Entries()) != 0 || h.cuts(h.ns, "nic0") != 0 {
				t.Errorf("in the end:\n%swas\n%s%+v, %d cuts", h.state(), before, h.journal.Entries(), h.cuts(h.ns, "nic0"))
			}
		})
	}
}

// An uplink's MTU rises while packets are split. Full frames pass before the next round, even if that
// round refuses the latency.
func TestSplitMTU(t *testing.T) {
	testkit.InFull(t)
	const refused = 20_000
	for _, mtu := range []int{5000, refused} {
		t.Run(fmt.Sprint(mtu), func(t *testing.T) {
			h := newHost(t, gbit)
			h.start()
			x, y, to := h.two("host")
			must(t, h.apply(x.c, policy.Net{Weight: 1}))
			must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
			h.run(h.wire, "udp-recv", "--listen", ":9002")
			h.run(x.box, "udp-send", "--rate", "2000", "--size", "4000", "--to", to+":9002")
			longest := h.longest(h.ns, h.nic0)
			super(t, longest, false, "fragments")
			for dev, at := range map[string]*sandbox.Box{"wire": h.wire, "nic0": h.ns} {
				h.Change(at, dev, func(n *netlink.Handle, l netlink.Link) error { return n.LinkSetMTU(l, mtu) })
			}
			if mtu == refused {
				testkit.Is(t, "a latency that frames are too long for", h.apply(x.c, policy.Net{Weight: 1}), model.ErrInfeasible)
			}
			super(t, longest, true, "the MTU is raised")
		})
	}
}

// Delays of classes that split packets are not reported, because other packets leave than arrived. They
// restart afterwards.
func TestSplitDelays(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.delays = true
	h.start()
	x, y, to := h.two("bridge")
	must(t, h.apply(x.c, policy.Net{Weight: 1}))
	h.run(h.wire, "tcp-recv", "--listen", ":9001")
	bulk := h.run(x.box, "tcp-send", "--to", to+":9001")
	row := func(id container.ID) traffic.Row {
		t.Helper()
		rows := h.traffic.Read().Rows
		i := slices.IndexFunc(rows, func(r traffic.Row) bool { return r.Container == api.ID(id) })
		if i < 0 {
			t.Fatalf("no row of %d: %+v", id, rows)
		}
		return rows[i]
	}
	waits := func(c container.Container, n uint64, when string) {
		t.Helper()
		if got := counted(func() uint64 { return row(c.ID).Delays.Count() }, 0, n); got < n {
			t.Errorf("%s: %d packets have a delay", when, got)
		}
	}
	waits(x.c, 100, "not cut")
	must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
	h.send(y.box, to+":9000")
	waits(y.c, datagrams/2, "with a latency") // a program that runs on top of another sees nothing
	m, err := h.traffic.Measure(t.Context(), 100*time.Millisecond)
	must(t, errors.Join(err, m.Err))
	for _, r := range m.Rows {
		if (r.Delays == nil) != (r.Container != api.ID(y.c.ID)) {
			t.Errorf("%d, cut to %d: delays %v", r.Container, r.Split, r.Delays)
		}
	}
	bulk.SetRate(0)
	cut := row(x.c.ID).Packets
	for was, end := uint64(0), time.Now().Add(20*time.Second); was != cut && time.Now().Before(end); cut = row(x.c.ID).Packets {
		was = cut // until none is in flight
		time.Sleep(100 * time.Millisecond)
	}
	must(t, h.traffic.Remove(t.Context(), y.c.ID))
	now := row(x.c.ID)
	if n, sent := now.Delays.Count(), now.Packets-cut; n > sent {
		t.Errorf("%d packets have been sent since they were cut, and there are delays of %d", sent, n)
	}
	bulk.SetRate(load.Flood)
	waits(x.c, 1, "not cut any more")
}

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

// If the kernel has HFSC, it keeps a latency, unless a container has a priority; otherwise HTB does. A
// latency that cannot be kept is refused.
func TestLatencyPolicy(t *testing.T) {
	testkit.InFull(t)
	h, box, c := newBridged(t)
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

	// A latency shorter than another container's packet takes: nothing changes.
	during := h.state()
	err := h.apply(c, policy.Net{Rate: mbit, Latency: 500 * time.Microsecond})
	if !errors.Is(err, model.ErrInfeasible) || !strings.Contains(err.Error(), "uplink nic0: latency refused: a packet of any other container") {
		t.Errorf("500 us: %v", err)
	}
	testkit.Same(t, "refused, and changed", during, h.state())
	packets(shaper())

	// With the last latency, HFSC is no longer needed.
	must(t, h.apply(c, policy.Net{Rate: mbit}))
	packets(qdisc.KindHTB)

	must(t, h.traffic.Remove(t.Context(), c.ID))
	h.removes(before, two.ID)
}
