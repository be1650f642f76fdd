package traffic_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// each calls fn with all BPF objects of a kind in the kernel.
func each[ID ~uint32, O io.Closer](t testing.TB, next func(ID) (ID, error), open func(ID) (O, error), fn func(O)) {
	t.Helper()
	for id, err := next(0); !errors.Is(err, os.ErrNotExist); id, err = next(id) {
		must(t, err)
		o, err := open(id)
		if errors.Is(err, os.ErrNotExist) { // it is already gone
			continue
		}
		must(t, err)
		fn(o)
		must(t, o.Close())
	}
}

// meters returns the number of programs that measure delays.
func meters(t *testing.T) (n int) {
	t.Helper()
	each(t, ebpf.ProgramGetNextID, ebpf.NewProgramFromID, func(p *ebpf.Program) {
		info, err := p.Info()
		if must(t, err); info.Name == "fl_enqueue" {
			n++
		}
	})
	return n
}

// metersAre waits for that number, because the kernel frees programs later.
func metersAre(t *testing.T, want int, when string) {
	t.Helper()
	until(t, fmt.Sprintf("%s: %d programs", when, want), func() (string, bool) { n := meters(t); return fmt.Sprint(n), n == want })
}

// delaysOf returns a container's histogram at the uplink; nil: none.
func (h *host) delaysOf(id container.ID) *hist.Classic {
	for _, s := range h.traffic.Snapshot().Samples {
		if s.Container == id && s.Name == "traffic_delay_seconds" && s.Device == "nic0" && slices.Contains(s.Labels, feature.Label{Name: "direction", Value: "egress"}) {
			return s.Histogram.Classic
		}
	}
	return nil
}

// The programs that always measure come with the first class and go with the last. A class that is made
// anew starts at zero. TestDelays shows that the measurements are right.
func TestDelaysAlways(t *testing.T) {
	testkit.InFull(t)
	before := meters(t)
	h := newHost(t, gbit)
	h.delays = true
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	_, q := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	metersAre(t, before, "nobody is shaped")
	must(t, h.apply(c, policy.Net{Weight: 1}))
	must(t, h.apply(q, policy.Net{Weight: 1}))
	metersAre(t, before+1, "two are shaped")
	h.resolve(box, h.wire, "10.66.0.1:9000")
	h.send(box, "10.66.0.1:9000")
	// A kernel may run no BPF program while some process is current.
	if is := h.delaysOf(c.ID); is == nil || is.Count < datagrams*9/10 || h.delaysOf(0) == nil {
		t.Fatalf("%+v", h.traffic.Snapshot())
	}

	// A caller gets exactly the packets sent during its call, from the same programs.
	type answer struct {
		traffic.Reading
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		m, err := h.traffic.Measure(t.Context(), 300*time.Millisecond)
		answers <- answer{m, err}
	}()
	h.send(box, "10.66.0.1:9000")
	programs := meters(t)
	asked := <-answers
	must(t, errors.Join(asked.err, asked.Err))
	i := slices.IndexFunc(asked.Rows, func(r traffic.Row) bool { return r.Container == api.ID(c.ID) && r.Uplink == "nic0" })
	if i < 0 || asked.Rows[i].Delays == nil {
		t.Fatalf("no delays: %+v", asked.Rows)
	}
	if got := asked.Rows[i].Delays.Count(); got > datagrams+5 || programs != before+1 {
		t.Errorf("of %d packets who asks is told of %d, by %d programs", datagrams, got, programs-before)
	}

	// The measurement ends with its class, and the programs with the last class.
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if got := h.delaysOf(c.ID); got != nil {
		t.Errorf("without policy: %+v", got)
	}
	must(t, h.apply(c, policy.Net{Weight: 2}))
	if got := h.delaysOf(c.ID); got == nil || got.Count > 5 {
		t.Errorf("anew: %+v", got)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	must(t, h.traffic.Remove(t.Context(), q.ID))
	metersAre(t, before, "nobody is shaped any more")
	must(t, h.apply(c, policy.Net{Weight: 2}))
	metersAre(t, before+1, "one is shaped again")
	must(t, h.traffic.Close())
	metersAre(t, before, "closed")
}

// stamps returns the number of packets with a stamp, including lost packets.
func stamps(t testing.TB) (n int) {
	t.Helper()
	each(t, ebpf.MapGetNextID, ebpf.NewMapFromID, func(m *ebpf.Map) {
		if info, err := m.Info(); err == nil && info.Name == "fl_queued" {
			var index uint32
			var row [16]uint64 // eight packets, and their arrival times
			for it := m.Iterate(); it.Next(&index, &row); {
				for _, skb := range row[:8] {
					if skb != 0 {
						n++
					}
				}
			}
		}
	})
	return n
}

// A container gives its own qdisc our handle, and keeps packets in it. They take no room from measured
// packets.
func TestDelaysForged(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.delays = true
	h.bridge()
	bad, liar := h.add("one", "10.66.0.2/24", h.ns)
	h.listen()
	h.start()
	must(t, h.apply(liar, policy.Net{Weight: 1}))
	h.resolve(bad, h.wire, "10.66.0.1:9000")
	h.Change(bad, "eth0", func(n *netlink.Handle, l netlink.Link) error {
		return forgeRoot(n, l, 8000)
	})
	before := stamps(t)
	h.send(bad, "10.66.0.1:9000")
	if after := stamps(t); after > before+5 {
		t.Errorf("%d stamps, %d before its packets", after, before)
	}
}

// burst is datagrams of 1250 bytes, headers included, sent at once by an uplink of 2 Mbit/s: 5 ms
// for each.
type burst struct {
	took []time.Duration // from the sender's call to the other end of the wire, sorted
	sent time.Duration   // from the first call to the end of the last
}

// floor is the shortest wait of datagram k: earlier datagrams had to leave, except for a few that the
// buckets release at once.
func (b burst) floor(k int) time.Duration {
	const each, atOnce = 5 * time.Millisecond, 4
	return max(0, time.Duration(k-atOnce)*each-b.sent)
}

// quantile bounds a quantile of delays measured on the way. Some datagrams may be missing from
// them, and neighbour requests among them.
func (b burst) quantile(q float64, packets uint64) (low, high time.Duration) {
	const others = 5
	n, at := len(b.took), int(q*float64(packets))
	missing := max(0, n-int(packets))
	return b.floor(max(0, at-others)), b.took[min(at+missing+others, n-1)]
}

// burst sends n datagrams to the wire's port 9001. Arrival is by the kernel's clock there, as a
// slow machine reads them much later.
func (h *host) burst(from *sandbox.Box, n int) burst {
	h.t.Helper()
	var in net.PacketConn
	must(h.t, h.wire.Do(func() (err error) { in, err = net.ListenPacket("udp", ":9001"); return err }))
	defer in.Close()
	wire := in.(*net.UDPConn)
	must(h.t, wire.SetReadBuffer(1<<20))
	raw, err := wire.SyscallConn()
	must(h.t, err)
	must(h.t, errors.Join(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
	}), err))
	var sent burst
	must(h.t, from.Do(func() error {
		out, err := net.Dial("udp", "10.66.0.1:9001")
		if err != nil {
			return err
		}
		defer out.Close()
		if err := out.(*net.UDPConn).SetWriteBuffer(1 << 20); err != nil {
			return err
		}
		datagram := make([]byte, 1250-14-20-8)
		start := time.Now()
		for range n {
			binary.NativeEndian.PutUint64(datagram, uint64(time.Now().UnixNano()))
			if _, err := out.Write(datagram); err != nil {
				return err
			}
		}
		sent.sent = time.Since(start)
		return nil
	}))
	for buf, control := make([]byte, 2048), make([]byte, 256); len(sent.took) < n; {
		must(h.t, in.SetReadDeadline(time.Now().Add(20*time.Second)))
		_, size, _, _, err := wire.ReadMsgUDP(buf, control)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break // the test reports it
		}
		must(h.t, err)
		messages, err := unix.ParseSocketControlMessage(control[:size])
		must(h.t, err)
		if len(messages) != 1 || messages[0].Header.Type != unix.SO_TIMESTAMPNS {
			h.t.Fatalf("no time of arrival: %+v", messages)
		}
		var at unix.Timespec
		_, err = binary.Decode(messages[0].Data, binary.NativeEndian, &at)
		must(h.t, err)
		sent.took = append(sent.took, time.Duration(at.Nano()-int64(binary.NativeEndian.Uint64(buf))))
	}
	slices.Sort(sent.took)
	return sent
}

// TestDelays sends bursts through a slow uplink, where each datagram waits for the earlier ones, and
// compares the meter with the real times.
func TestDelays(t *testing.T) {
	testkit.InFull(t)
	const n = 200
	h := newHost(t, 2*mbit) // 5 ms for each datagram, longer than it takes to send
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	quiet, q := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	must(t, h.apply(c, policy.Net{Weight: 1}))
	must(t, h.apply(q, policy.Net{Weight: 1}))
	for _, b := range []*sandbox.Box{box, quiet} {
		must(t, b.Sysctl("ipv6/conf/all/disable_ipv6", "1")) // IPv6 sends packets by itself
		h.resolve(b, h.wire, "10.66.0.1:9000")
	}

	nic := func(minor uint16) delay.Class {
		return delay.Class{NetNS: h.Open(h.ns).Inode(), Index: h.nic0, Minor: minor}
	}
	own, other := nic(uint16(h.slots.Lookup(c.TenantKey()))), nic(uint16(h.slots.Lookup(q.TenantKey())))
	m, err := delay.Open(own.NetNS, []delay.Class{own, other, nic(qdisc.MinorDefault)})
	must(t, err)
	sent := h.burst(box, n)
	got, err := m.Read(own)
	must(t, err)
	none, err := m.Read(other)
	must(t, err)
	rest, err := m.Read(nic(qdisc.MinorDefault))
	must(t, err)
	missed, err := m.Missed()
	must(t, err)
	must(t, m.Close())
	// Some packets are neighbour requests. And a kernel may run no BPF program while some process
	// is current: a dequeue in a softirq on top of it is missed.
	if len(sent.took) != n || got.Count() < n*9/10 || got.Count() > n+5 || none.Count() > 5 || missed != 0 {
		t.Fatalf("of %d datagrams %d came; %d waited, %d missed, %d of who sends nothing, %d of everybody else", n, len(sent.took), got.Count(), missed, none.Count(), rest.Count())
	}
	for _, quantile := range []float64{0.5, 0.9} {
		low, high := sent.quantile(quantile, got.Count())
		// A bucket's middle is within 1/16 of its values.
		if says := got.Quantile(quantile); says < low*15/16 || says > high*17/16 {
			t.Errorf("quantile %v is %v, that of the datagrams is from %v to %v", quantile, says, low, high)
		}
	}
	if low := sent.floor(n / 2); sent.took[n/2] < low {
		t.Errorf("half of them took no longer than %v, want %v: they have not waited", sent.took[n/2], low)
	}

	// From the feature: each class in its row, without earlier packets.
	steady := h.run(box, "udp-send", "--to", "10.66.0.1:9000", "--rate", "500", "--size", "100")
	before := steady.Read()
	measured, err := h.traffic.Measure(t.Context(), 500*time.Millisecond)
	must(t, err)
	most := steady.Read().Since(before).Ops + 5
	must(t, measured.Err)
	row := func(id container.ID) *traffic.Row {
		i := slices.IndexFunc(measured.Rows, func(r traffic.Row) bool {
			return r.Container == api.ID(id) && r.Uplink == "nic0" && r.Direction == "egress"
		})
		if i < 0 || measured.Rows[i].Delays == nil {
			t.Fatalf("no delays of %v: %+v", id, measured.Rows)
		}
		return &measured.Rows[i]
	}
	if of := row(c.ID).Delays; of.Count() == 0 || of.Count() > most {
		t.Errorf("%d packets waited, of %d at the most", of.Count(), most)
	}
	if of := row(q.ID).Delays; of.Count() > 5 {
		t.Errorf("%d packets of who sends nothing", of.Count())
	}
}
