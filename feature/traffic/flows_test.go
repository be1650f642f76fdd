package traffic_test

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/policy"
)

// crowded makes a host with two containers that share what nic0 receives: one receives many flows, the
// other a single flow. It returns a receiver at the first, and a function that sends a packet of the
// single flow and waits until it has arrived, so that no queue overflows.
func crowded(t *testing.T) (h *host, many, single container.Container, got *load.Board, send func() error) {
	t.Helper()
	needSharing(t)
	h = newHost(t, gbit)
	h.bridge()
	one, many := h.add("one", "10.66.0.2/24", h.ns)
	two, single := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	h.resolve(one, h.wire, "10.66.0.1:9000")
	h.resolve(two, h.wire, "10.66.0.1:9000")
	got = h.take(one)
	must(t, h.due(many, policy.Net{}, policy.Net{Weight: 1}))
	must(t, h.due(single, policy.Net{}, policy.Net{Weight: 1}))
	var in net.PacketConn
	var out net.Conn
	must(t, two.Do(func() (err error) { in, err = net.ListenPacket("udp", ":9000"); return err }))
	must(t, h.wire.Do(func() (err error) { out, err = net.Dial("udp", "10.66.0.3:9000"); return err }))
	t.Cleanup(func() { in.Close(); out.Close() })
	return h, many, single, got, func() error {
		return errors.Join(testkit.SendDatagrams(out, 1, 100), in.SetReadDeadline(time.Now().Add(20*time.Second)), third(in.ReadFrom(make([]byte, 200))))
	}
}

// One container receives more flows than the table holds. A neighbour's flow that continues meanwhile
// is not forgotten: each of its packets is in its class. Afterwards the host learns new flows as
// before.
func TestManyFlows(t *testing.T) {
	testkit.InFull(t)
	h, many, steady, got, goesOn := crowded(t)
	must(t, goesOn()) // the host knows the flow now
	own, sent := h.arrived(&steady).Packets, uint64(0)
	flows := h.flood(func() error { sent++; return goesOn() })
	if n := h.arrived(&steady).Packets - own; n != sent {
		t.Errorf("of %d packets of one flow among %d flows %d are in its class", sent, flows, n)
	}

	flow := h.learnt("10.66.0.2:9000", got)
	own = h.arrived(&many).Packets
	must(t, testkit.SendDatagrams(flow, datagrams, 100))
	if n := counted(func() uint64 { return h.arrived(&many).Packets }, own, datagrams); n != datagrams {
		t.Errorf("of %d packets of a new flow %d are in their class", datagrams, n)
	}
}

// A flow that has lasted for a moment is not forgotten either if it pauses while one container receives
// more new flows than the table holds.
func TestRareFlow(t *testing.T) {
	testkit.InFull(t)
	h, _, rare, _, send := crowded(t)
	until(t, "a flow that goes on is taken for one", func() (string, bool) {
		must(t, send())
		used := h.traffic.Maps()
		return fmt.Sprint(used), slices.ContainsFunc(used, func(u bpf.Usage) bool { return u.Map == "fl_steady" && u.Entries > 0 })
	})
	own := h.arrived(&rare).Packets
	flows := h.flood(func() error { return nil })
	must(t, send())
	if n := h.arrived(&rare).Packets - own; n != 1 {
		t.Errorf("of one packet after %d new flows %d are in its class", flows, n)
	}
}

// flood makes one container receive more flows than the table holds, and calls between after every few
// of them. It returns their number.
func (h *host) flood(between func() error) (flows int) {
	h.t.Helper()
	const ports = 60_000
	flows = testkit.Scale(h.t, 5*65536/4, 3*65536)
	must(h.t, h.wire.Do(func() error {
		for first := 0; first < flows; first += ports { // from another port each time
			if err := eachPort(min(ports, flows-first), [4]byte{10, 66, 0, 2}, between); err != nil {
				return err
			}
		}
		return nil
	}))
	return flows
}

func third[A, B any](_ A, _ B, err error) error { return err }

// eachPort sends a datagram to each of n ports, each from a separate port, and calls between after
// every few of them.
func eachPort(n int, to [4]byte, between func() error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for i := range n {
		err := unix.Sendto(fd, make([]byte, 64), 0, &unix.SockaddrInet4{Port: 1024 + i, Addr: to})
		if err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
		if i%50 == 49 {
			if err := between(); err != nil {
				return err
			}
		}
	}
	return between()
}
