package traffic_test

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/sandbox"
)

// burst sends n datagrams of 1250 bytes with all headers at once, and gives how
// long each took to the wire's port 9001, by the kernel's clock there: where the
// machine is slow they have come long before they are read.
func (h *host) burst(from *sandbox.Box, n int) []time.Duration {
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
		for range n {
			binary.NativeEndian.PutUint64(datagram, uint64(time.Now().UnixNano()))
			if _, err := out.Write(datagram); err != nil {
				return err
			}
		}
		return nil
	}))
	var took []time.Duration
	for buf, control := make([]byte, 2048), make([]byte, 256); len(took) < n; {
		must(h.t, in.SetReadDeadline(time.Now().Add(2*time.Second)))
		_, size, _, _, err := wire.ReadMsgUDP(buf, control)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break // the test tells
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
		took = append(took, time.Duration(at.Nano()-int64(binary.NativeEndian.Uint64(buf))))
	}
	return took
}

// TestDelays sends bursts by a slow uplink, where each datagram waits for those
// before it, and compares what the meter says with how long they really took.
func TestDelays(t *testing.T) {
	const n = 200
	h := newHost(t, 2*mbit) // 5 ms for each datagram, longer than it takes to send
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	quiet, q := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	must(t, h.apply(c, policy.Net{Weight: 1}))
	must(t, h.apply(q, policy.Net{Weight: 1}))
	h.send(box, "10.66.0.1:9000") // so that addresses are resolved
	h.send(quiet, "10.66.0.1:9000")

	nic := func(minor uint16) delay.Class {
		return delay.Class{NetNS: h.open(h.ns).Inode(), Index: h.nic0, Minor: minor}
	}
	own, other := nic(uint16(h.slots.Lookup(slot.Of(c)))), nic(uint16(h.slots.Lookup(slot.Of(q))))
	m, err := delay.Open(own.NetNS, []delay.Class{own, other, nic(qdisc.MinorDefault)})
	must(t, err)
	took := h.burst(box, n)
	got, err := m.Read(own)
	must(t, err)
	none, err := m.Read(other)
	must(t, err)
	rest, err := m.Read(nic(qdisc.MinorDefault))
	must(t, err)
	missed, err := m.Missed()
	must(t, err)
	must(t, m.Close())
	// Neighbours are asked for, now and then. And a kernel may run no BPF program
	// while some process is current: a dequeue in a softirq on top of it is missed.
	if len(took) != n || got.Packets() < n*9/10 || got.Packets() > n+5 || none.Packets() > 5 || missed != 0 {
		t.Fatalf("of %d datagrams %d came; %d waited, %d missed, %d of who sends nothing, %d of everybody else", n, len(took), got.Packets(), missed, none.Packets(), rest.Packets())
	}
	slices.Sort(took)
	for _, quantile := range []float64{0.5, 0.9} {
		want, says := took[int(quantile*n)], got.Quantile(quantile)
		t.Logf("quantile %v: %v, the datagrams took %v", quantile, says, want)
		if diff := (want - says).Abs(); diff > want/8+5*time.Millisecond {
			t.Errorf("quantile %v is %v, the datagrams took %v", quantile, says, want)
		}
	}
	if p50 := took[n/2]; p50 < 50*time.Millisecond {
		t.Errorf("half of them took no longer than %v: nothing waited", p50)
	}

	// By the feature: each in its row, and nothing of before.
	steady := h.run(box, "udp-send", "--to", "10.66.0.1:9000", "--rate", "500", "--size", "100")
	before := steady.Read()
	measured, err := h.traffic.Measure(t.Context(), time.Second)
	must(t, err)
	sent := steady.Read().Since(before).Ops
	must(t, measured.Err)
	row := func(id container.ID) *traffic.Row {
		i := slices.IndexFunc(measured.Rows, func(r traffic.Row) bool {
			return r.Container == id && r.Uplink == "nic0" && r.Direction == traffic.Egress
		})
		if i < 0 || measured.Rows[i].Delays == nil {
			t.Fatalf("no delays of %v: %+v", id, measured.Rows)
		}
		return &measured.Rows[i]
	}
	if of := row(c.ID).Delays; of.Packets() == 0 || of.Packets() > sent+5 || of.Quantile(0.5) > 50*time.Millisecond {
		t.Errorf("%d packets of %d waited, half of them no longer than %v", of.Packets(), sent, of.Quantile(0.5))
	}
	if of := row(q.ID).Delays; of.Packets() > 5 {
		t.Errorf("%d packets of who sends nothing", of.Packets())
	}
}
