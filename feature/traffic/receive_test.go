package traffic_test

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// arrived returns the counters of a container's class for what nic0 receives; nil: of the default
// class.
func (h *host) arrived(c *container.Container) qdisc.Stats {
	h.t.Helper()
	return h.counters(h.Index(h.ns, netdev.IFBName(h.nic0)), c)
}

// take listens in a box, by a process of its container, so that packets to it cause no answer.
func (h *host) take(box *sandbox.Box) *load.Board {
	h.t.Helper()
	return h.takeAt(box, 9000)
}

// takeAt listens at another port. The socket's buffer holds all that a test sends, as the process
// may have to wait for a CPU.
func (h *host) takeAt(box *sandbox.Box, port int) *load.Board {
	h.t.Helper()
	return h.run(box, "udp-recv", "--buffer", "8388608", "--listen", fmt.Sprintf("[::]:%d", port))
}

// reach returns the address by which the wire reaches a container of a mode.
func (h *host) reach(mode string) string {
	switch {
	case strings.HasPrefix(mode, "overlay"):
		return "10.69.0.2:9000"
	case strings.HasSuffix(mode, "IPv6"):
		return "[fd66::2]:9000"
	case mode == "routed":
		return "10.67.0.2:9000"
	case mode == "NAT":
		must(h.t, ipt(h.ns, "-t", "nat", "-A", "PREROUTING", "-i", "nic0", "-p", "udp", "--dport", "9000", "-j", "DNAT", "--to-destination", "10.67.0.2"))
		return "10.66.0.254:9000"
	case mode == "host":
		return "10.66.0.254:9000"
	}
	return "10.66.0.2:9000"
}

// through returns how many of the sent packets a receiver has got, once all have arrived or no more
// come.
func (h *host) through(got *load.Board, was load.Reading, sent uint64) uint64 {
	return counted(func() uint64 { return got.Read().Since(was).Ops }, 0, sent)
}

// learnt opens a flow from the wire, by default from any port, and waits until its first packet has
// arrived. From then on the host knows its receiver.
func (h *host) learnt(to string, got *load.Board, port ...int) net.Conn {
	h.t.Helper()
	var dialer net.Dialer
	if len(port) > 0 {
		dialer.LocalAddr = &net.UDPAddr{Port: port[0]}
	}
	var flow net.Conn
	must(h.t, h.wire.Do(func() (err error) { flow, err = dialer.Dial("udp", to); return err }))
	h.t.Cleanup(func() { flow.Close() })
	was := got.Read()
	must(h.t, write(flow, 1, 100))
	if h.through(got, was, 1) == 0 {
		h.t.Fatalf("the first packet to %s is lost", to)
	}
	return flow
}

// neighbour makes a box send what is for an address to the eth0 of another box, whichever box claims it.
func (h *host) neighbour(at *sandbox.Box, dev, addr string, to *sandbox.Box) {
	h.t.Helper()
	must(h.t, at.Neighbour(dev, netip.MustParseAddr(addr), h.MAC(to, "eth0")))
}

// spoof sends some datagrams from an address and port to another.
func (h *host) spoof(b *sandbox.Box, from, to string, priority uint32) {
	h.t.Helper()
	local, err := net.ResolveUDPAddr("udp", from)
	must(h.t, err)
	must(h.t, b.Do(func() error {
		c, err := (&net.Dialer{LocalAddr: local}).Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		return sendAs(c.(*net.UDPConn), priority, 5)
	}))
}

// passes waits until packets from the wire get through.
func (h *host) passes(got *load.Board) {
	h.t.Helper()
	h.passesFrom(h.wire, "10.66.0.2:9000", got, "packets from the wire")
}

// passesFrom waits until all of some packets get through, and no more is lost.
func (h *host) passesFrom(from *sandbox.Box, to string, got *load.Board, what string) {
	h.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		was := got.Read()
		sent := h.send(from, to)
		if countedFor(time.Second, func() uint64 { return got.Read().Since(was).Ops }, 0, sent) >= sent {
			return
		}
	}
	h.t.Errorf("%s are lost", what)
}
