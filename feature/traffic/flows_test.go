package traffic_test

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/policy"
)

// TestManyFlows sends one container three times as many flows as the table
// holds, or where time is short a quarter more than it holds. A neighbour's flow
// that goes on meanwhile is not forgotten for them, and when the many have ended
// new flows are learnt as ever.
func TestManyFlows(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	one, many := h.add("one", "10.66.0.2/24", h.ns)
	two, steady := h.add("two", "10.66.0.3/24", h.ns)
	h.start()
	h.listen()
	h.send(one, "10.66.0.1:9000") // so that addresses are resolved
	h.send(two, "10.66.0.1:9000")
	h.take(one)
	got := h.take(two)
	must(t, h.due(many, policy.Net{}, policy.Net{Weight: 1}))
	must(t, h.due(steady, policy.Net{}, policy.Net{Weight: 1}))

	flow := h.run(h.wire, "udp-send", "--to", "10.66.0.3:9000", "--rate", "500", "--size", "100")
	time.Sleep(100 * time.Millisecond) // it is known
	const ports = 60_000
	flows := 3 * 65536
	if testing.Short() {
		flows = 5 * 65536 / 4
	}
	for try := 1; ; try++ {
		sent, own, here := flow.Read(), h.arrived(&steady).Packets, got.Read()
		must(t, h.wire.Do(func() error {
			for first := 0; first < flows; first += ports { // from another port each time
				if err := eachPort(min(ports, flows-first), [4]byte{10, 66, 0, 2}); err != nil {
					return err
				}
			}
			return nil
		}))
		steadySent := flow.Read().Since(sent).Ops
		gained, came := h.arrived(&steady).Packets-own, got.Read().Since(here).Ops
		told, err := h.traffic.Inpaths()
		must(t, err)
		t.Logf("%d packets of one flow among %d flows: %d in its class, %d received; told by %v", steadySent, flows, gained, came, told)
		if steadySent >= 200 && gained >= steadySent*95/100 && came >= steadySent*95/100 {
			break
		}
		// What waits for a CPU that others keep is bounded, whosever it is; what the
		// table forgets it forgets each time.
		if try == 3 {
			t.Fatalf("of %d packets %d were in their class and %d came", steadySent, gained, came)
		}
	}

	// One of those that the table has forgotten is as good as a new one.
	before := h.arrived(&many).Packets
	sent := h.send(h.wire, "10.66.0.2:9000")
	if n := counted(func() uint64 { return h.arrived(&many).Packets }, before, sent*95/100); n < sent*95/100 {
		t.Errorf("of %d packets of a new flow %d were in their class", sent, n)
	}
}

// eachPort sends a datagram to each of n ports, from one of its own.
func eachPort(n int, to [4]byte) error {
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
		if i%50 == 0 { // what waits for another CPU is bounded
			time.Sleep(200 * time.Microsecond)
		}
	}
	return nil
}
