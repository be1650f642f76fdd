package traffic_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
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
	st, there := all[uint16(h.slots.Lookup(identity.TenantOf(c)))]
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
	if h.state() != during {
		t.Errorf("refused, and changed:\n%swas\n%s", h.state(), during)
	}
	packets(shaper())

	// The last latency goes, and with it the need for HFSC.
	must(t, h.apply(c, policy.Net{Rate: mbit}))
	packets(qdisc.KindHTB)

	must(t, h.traffic.Remove(t.Context(), c.ID))
	h.removes(before, two.ID)
}

// The same towards a container.
func TestIngressLatency(t *testing.T) {
	testkit.InFull(t)
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	h.start()
	before := h.state()
	got := h.take(box)
	must(t, h.due(c, policy.Net{}, policy.Net{Rate: mbit, Latency: 2 * time.Millisecond}))
	must(t, write(h.learnt("10.66.0.2:9000", got), datagrams, 100))
	d, err := qdisc.Open(h.Open(h.ns), h.Index(h.ns, netdev.IFBName(h.nic0)))
	must(t, err)
	defer d.Close()
	if n := counted(func() uint64 {
		all, err := d.Stats(shaper())
		must(t, err)
		return all[uint16(h.slots.Lookup(identity.TenantOf(c)))].Packets
	}, 0, datagrams); n != datagrams {
		t.Errorf("of %d packets towards the container %d are in its class", datagrams, n)
	}
	h.removes(before, c.ID)
}

// ping sends n echo requests from a box, one every 2 ms, and returns the sorted response times. The
// kernel answers and timestamps, so scheduling of the process has little influence.
func ping(box *sandbox.Box, to string, n int) ([]time.Duration, error) {
	var took []time.Duration
	err := box.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		half := unix.NsecToTimeval(int64(500 * time.Millisecond))
		addr := netip.MustParseAddr(to).As4()
		if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &half),
			unix.Connect(fd, &unix.SockaddrInet4{Addr: addr})); err != nil {
			return err
		}
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for seq := range n {
			<-tick.C
			sent, came, err := echo(fd, uint16(seq))
			if err != nil {
				return err
			}
			took = append(took, came.Sub(sent))
		}
		return nil
	})
	slices.Sort(took)
	return took, err
}

// echo sends one request, and returns the times of request and answer.
func echo(fd int, seq uint16) (sent, came time.Time, err error) {
	ask := make([]byte, 64)
	ask[0] = 8 // echo request
	binary.BigEndian.PutUint16(ask[4:], 0x666c)
	binary.BigEndian.PutUint16(ask[6:], seq)
	var sum uint32
	for i := 0; i < len(ask); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ask[i:]))
	}
	binary.BigEndian.PutUint16(ask[2:], ^uint16(sum+sum>>16))
	sent = time.Now()
	if _, err := unix.Write(fd, ask); err != nil {
		return sent, came, err
	}
	buf, oob := make([]byte, 256), make([]byte, 64)
	for {
		n, m, _, _, err := unix.Recvmsg(fd, buf, oob, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			return sent, time.Now(), nil // lost: as long as the wait for it
		}
		if err != nil {
			return sent, came, err
		}
		// An IPv4 header without options, then the answer.
		if n < 28 || buf[20] != 0 || binary.BigEndian.Uint16(buf[26:]) != seq {
			continue
		}
		stamps, err := unix.ParseSocketControlMessage(oob[:m])
		if err != nil || len(stamps) != 1 || len(stamps[0].Data) < 16 {
			return sent, came, fmt.Errorf("no time stamp: %v", err)
		}
		ne := binary.NativeEndian
		return sent, time.Unix(int64(ne.Uint64(stamps[0].Data)), int64(ne.Uint64(stamps[0].Data[8:]))), nil
	}
}

// aside makes a container with a wire of its own, without a shaper. A ping there measures the
// machine at the same time.
func (h *host) aside() (box *sandbox.Box, to string) {
	h.t.Helper()
	box = h.Create(sandbox.Spec{Name: "aside"})
	must(h.t, sandbox.Wire(
		sandbox.End{Box: h.wire, Name: "wire1", Addr: netip.MustParsePrefix("10.68.0.1/24")},
		sandbox.End{Box: box, Name: "eth0", Addr: netip.MustParsePrefix("10.68.0.2/24")}))
	return box, "10.68.0.1"
}

// BenchmarkLatency measures a ping to the wire and back, beside a container that floods the uplink:
// in the default class, with a weight of its own, and with a bound of 2 ms. It also measures the
// wait at the uplink's queue, and a ping that passes no queue.
func BenchmarkLatency(b *testing.B) {
	for _, load := range []struct {
		name string
		send []string
	}{
		{"alone", nil},
		{"six bulk TCP", tcp(6)},
		{"UDP flood", []string{"udp-send", "--rate", "flood", "--size", "1400"}},
		{"UDP super-packets", []string{"udp-send", "--rate", "flood", "--size", "1400", "--segments", "40", "--buffer", "8388608"}},
	} {
		for _, tt := range []struct {
			name string
			net  policy.Net
		}{
			{"in everybody's class", policy.Net{}},
			{"weight", policy.Net{Weight: 1}},
			{"latency 2ms", policy.Net{Rate: 10 * mbit, Latency: 2 * time.Millisecond}},
		} {
			b.Run(load.name+", "+tt.name, func(b *testing.B) {
				h := newHost(b, gbit)
				h.start()
				x, y, to := h.two("bridge")
				past, there := h.aside()
				must(b, h.apply(fake(1), policy.Net{Weight: 1}))
				must(b, h.apply(y.c, tt.net))
				if tt.net != (policy.Net{}) {
					must(b, h.apply(x.c, policy.Net{Weight: 1}))
				}
				if load.send != nil {
					kind := map[string]string{"tcp-send": "tcp-recv", "udp-send": "udp-recv"}[load.send[0]]
					h.run(h.wire, kind, "--listen", ":9001")
					h.run(x.box, append(slices.Clone(load.send), "--to", to+":9001")...)
				}
				time.Sleep(500 * time.Millisecond)
				const frame = 14 + 20 + 64 // of an echo request
				q, err := rig.WatchQueue(h.Open(h.ns), h.nic0, frame)
				must(b, err)
				defer q.Close()
				const pings = 2000
				for b.Loop() {
					before, _, err := q.Read()
					must(b, err)
					var beside []time.Duration
					unshaped := make(chan error)
					go func() {
						var err error
						beside, err = ping(past, there, pings)
						unshaped <- err
					}()
					took, err := ping(y.box, to, pings)
					must(b, errors.Join(err, <-unshaped))
					after, _, err := q.Read()
					must(b, err)
					waited := after.Since(before)
					for name, q := range map[string]float64{"p50": 0.5, "p99": 0.99, "p99.9": 0.999} {
						at := int(q * (pings - 1))
						b.ReportMetric(float64(took[at].Microseconds()), name+"-us")
						b.ReportMetric(float64(beside[at].Microseconds()), name+"-aside-us")
						b.ReportMetric(float64(waited.Quantile(q).Microseconds()), name+"-queue-us")
					}
				}
			})
		}
	}
}
