package traffic_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
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
		// As many as fit, however fast more come.
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

// super waits until packets longer than frames leave, or only frames in two looks in a row; it
// fails with what it last saw.
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

// A latency that super-packets of others break is refused, or they are cut, as policy says: also
// those of existing connections, in every mode, and for as long as the latency is asked for. Its
// own are not.
func TestLatencySplit(t *testing.T) {
	testkit.OnKernels(t)
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
				if want := map[bool]int{true: 1522}[row.Container != y.c.ID]; row.Split != want {
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

// Towards a container, what the IFB holds is cut.
func TestIngressLatencySplit(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	_, two := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	before := h.state()
	must(t, h.due(c, policy.Net{}, policy.Net{Weight: 1}))
	must(t, h.due(two, policy.Net{}, policy.Net{Weight: 1}))
	got := h.run(box, "tcp-recv", "--listen", ":9001")
	h.run(h.wire, "tcp-send", "--to", "10.66.0.2:9001")
	ifb := h.longest(h.ns, h.Index(h.ns, netdev.IFBName(h.nic0)))
	super(t, ifb, true, "no latency")
	must(t, h.due(two, policy.Net{}, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
	super(t, ifb, false, "with a latency")
	was := got.Read()
	if n := counted(func() uint64 { return got.Read().Since(was).Bytes }, 0, 1<<20); n < 1<<20 {
		t.Errorf("%d bytes come through", n)
	}
	must(t, h.traffic.Remove(t.Context(), two.ID))
	super(t, ifb, true, "the latency is gone")
	h.removes(before, c.ID)
}

// A container with full control of its namespace cannot send longer packets.
func TestSplitHostile(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.start()
	x, y, to := h.two("bridge")
	must(t, h.apply(x.c, policy.Net{Weight: 1}))
	must(t, h.apply(y.c, policy.Net{Rate: mbit, Latency: hasty, Split: true}))
	h.run(h.wire, "tcp-recv", "--listen", ":9001")
	h.run(h.wire, "udp-recv", "--listen", ":9002")
	longest := h.longest(h.ns, h.nic0)
	for _, attack := range []struct {
		name string
		do   func(*netlink.Handle, netlink.Link) error
	}{
		{"longer super-packets", func(n *netlink.Handle, l netlink.Link) error {
			err := n.LinkSetGSOMaxSize(l, 190_000) // BIG TCP
			if errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EINVAL) {
				err = n.LinkSetGSOMaxSize(l, 65536)
			}
			return err
		}},
		{"its own root like ours", func(n *netlink.Handle, l netlink.Link) error { return forgeRoot(n, l, gbit) }},
	} {
		h.Change(x.box, "eth0", func(n *netlink.Handle, l netlink.Link) error {
			return attack.do(n, l)
		})
		for _, send := range []string{"tcp-send --to " + to + ":9001", "udp-send --rate 2000 --size 1400 --segments 40 --to " + to + ":9002"} {
			b := h.run(x.box, strings.Fields(send)...)
			super(t, longest, false, attack.name+": "+send)
			b.SetRate(0)
		}
	}
}

// The agent is killed while packets are cut. Another one adopts that, changes nothing, and ends it;
// or a restore does.
func TestSplitAdopt(t *testing.T) {
	testkit.InFull(t)
	for _, adopt := range []bool{true, false} {
		h := newHost(t, gbit)
		h.start()
		before := h.state()
		all := []container.Container{fake(1), fake(2)}
		nets := []policy.Net{{Weight: 3}, {Rate: mbit, Latency: hasty, Split: true}}
		handles := func() (out []string) {
			h.Change(h.ns, "nic0", func(n *netlink.Handle, l netlink.Link) error {
				list, err := n.QdiscList(l)
				for _, q := range list {
					if q.Type() == "tbf" {
						out = append(out, fmt.Sprintf("%x below %x", q.Attrs().Handle, q.Attrs().Parent))
					}
				}
				return err
			})
			slices.Sort(out)
			return out
		}
		for i, c := range all {
			must(t, h.apply(c, nets[i]))
		}
		during, cut := h.state(), handles()
		must(t, h.traffic.Close())
		must(t, h.journal.Close())
		if got := handles(); len(cut) != 2 || !slices.Equal(got, cut) {
			t.Errorf("after a kill: %v, were %v", got, cut)
		}
		h.start()
		if adopt {
			// The one that needs it comes last.
			for i, c := range all {
				must(t, h.apply(c, nets[i]))
			}
			must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
			if got := handles(); h.state() != during || len(got) != 2 {
				t.Errorf("adopted: %v, were %v:\n%swas\n%s", got, cut, h.state(), during)
			}
			must(t, h.traffic.Remove(t.Context(), all[1].ID))
			if got := handles(); len(got) != 0 {
				t.Errorf("the latency is gone: %v", got)
			}
			must(t, h.traffic.Remove(t.Context(), all[0].ID))
		} else {
			must(t, h.apply(all[0], policy.Net{}))
			must(t, h.traffic.Prune(t.Context(), func(container.ID) bool { return true }))
		}
		if got := handles(); h.state() != before || len(h.journal.Entries()) != 0 || len(got) != 0 {
			t.Errorf("in the end: %v\n%swas\n%s%+v", got, h.state(), before, h.journal.Entries())
		}
	}
}

// Delays of classes that cut packets are not reported, as what leaves is not what came; they
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
		i := slices.IndexFunc(rows, func(r traffic.Row) bool { return r.Container == id })
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
		if (r.Delays == nil) != (r.Container != y.c.ID) {
			t.Errorf("%d, cut to %d: delays %v", r.Container, r.Split, r.Delays)
		}
	}
	bulk.SetRate(0)
	cut := row(x.c.ID).Packets
	for was, end := uint64(0), time.Now().Add(20*time.Second); was != cut && time.Now().Before(end); cut = row(x.c.ID).Packets {
		was = cut // until none is under way
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

// BenchmarkSplit measures the cost of cutting packets of others, and the gain for a ping: one every
// 2 ms beside a container that sends at full speed, without and with in turns. A veth takes no time
// for a packet, so that this shows the cost and not the gain. CPU is that of the whole machine,
// including the receiver's, which a real wire would have elsewhere.
func BenchmarkSplit(b *testing.B) {
	for _, beside := range []struct {
		name string
		send []string
	}{
		{"six bulk TCP", tcp(6)},
		{"UDP super-packets", []string{"udp-send", "--rate", "flood", "--size", "1400", "--segments", "40", "--buffer", "8388608"}},
	} {
		for _, link := range []struct {
			name  string
			rate  uint64
			hasty time.Duration
		}{
			{"1 Gbit", gbit, hasty},
			{"40 Gbit", 40 * gbit, 10 * time.Microsecond},
		} {
			b.Run(beside.name+", "+link.name, func(b *testing.B) {
				h := newHost(b, link.rate)
				h.start()
				x, y, to := h.two("bridge")
				must(b, h.apply(x.c, policy.Net{Weight: 1}))
				got := h.run(h.wire, strings.Replace(beside.send[0], "send", "recv", 1), "--listen", ":9001")
				h.run(x.box, append(slices.Clone(beside.send), "--to", to+":9001")...)
				const frame = 14 + 20 + 64 // of an echo request
				q, err := rig.WatchQueue(h.Open(h.ns), h.nic0, frame)
				must(b, err)
				defer q.Close()
				modes := []policy.Net{{Rate: mbit, Latency: 2 * time.Millisecond}, {Rate: mbit, Latency: link.hasty, Split: true}}
				for b.Loop() {
					const rounds, pings = 3, 1000
					figures := make([]map[string][]float64, len(modes))
					for round := range rounds * len(modes) {
						mode := round % len(modes)
						must(b, h.apply(y.c, modes[mode]))
						time.Sleep(500 * time.Millisecond)
						before, _, err := q.Read()
						must(b, err)
						was, worked, start := got.Read(), busy(b), time.Now()
						took, err := ping(y.box, to, pings)
						must(b, err)
						f := map[string]float64{
							"Mbit/s": got.Read().Since(was).BitRate() / mbit,
							"CPU%":   100 * (busy(b) - worked).Seconds() / time.Since(start).Seconds(),
						}
						after, _, err := q.Read()
						must(b, err)
						for name, at := range map[string]float64{"p50": 0.5, "p99": 0.99, "p99.9": 0.999} {
							f[name+"-us"] = float64(took[int(at*(pings-1))].Nanoseconds()) / 1e3
							f[name+"-queue-us"] = float64(after.Since(before).Quantile(at).Nanoseconds()) / 1e3
						}
						if figures[mode] == nil {
							figures[mode] = make(map[string][]float64)
						}
						for name, v := range f {
							figures[mode][name] = append(figures[mode][name], v)
						}
					}
					for mode, name := range []string{"whole", "cut"} {
						for unit, v := range figures[mode] {
							slices.Sort(v)
							b.ReportMetric(v[len(v)/2], name+"-"+unit)
						}
					}
				}
			})
		}
	}
}

// busy returns how long all CPUs have worked.
func busy(t testing.TB) time.Duration {
	t.Helper()
	b, err := os.ReadFile("/proc/stat")
	must(t, err)
	line, _, _ := strings.Cut(string(b), "\n")
	var ticks [8]int64 // user, nice, system, idle, iowait, irq, softirq, steal
	_, err = fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &ticks[0], &ticks[1], &ticks[2], &ticks[3], &ticks[4], &ticks[5], &ticks[6], &ticks[7])
	must(t, err)
	return time.Duration(ticks[0]+ticks[1]+ticks[2]+ticks[5]+ticks[6]) * 10 * time.Millisecond
}
